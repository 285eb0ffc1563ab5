package pool

import (
	"cmp"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap"
)

// What engine warnings say.
const (
	warnPrefixCache  = "prefix caching is off"
	warnCachedTokens = "answers carry no cached-token counts"
	warnDoubted      = "KV events contradict what the engine reports"
	warnUnfollowed   = "the router cannot follow the engine's KV events"
	warnNoLoad       = "engine_load is on, and the engine reports no load"
	warnContradicts  = "the engine contradicts its configuration"
	warnNoLimit      = "max_running is auto, and the engine reports no limit"
)

// The flags that end a warning, by engine type.
var (
	prefixCacheFlags = map[string]string{
		engine.VLLM:   "start vLLM with --enable-prefix-caching",
		engine.SGLang: "start SGLang without --disable-radix-cache",
	}
	cachedTokensFlags = map[string]string{
		engine.VLLM:   "start vLLM with --enable-prompt-tokens-details",
		engine.SGLang: "start SGLang with --enable-cache-report",
	}
	limitFlags = map[string]string{
		engine.VLLM:   "set max_running to vLLM's --max-num-seqs, times its data-parallel ranks",
		engine.TRTLLM: "set max_running to TensorRT-LLM's --max_batch_size",
	}
)

// uncountedAnswers is how many answers in a row must lack a count of cached tokens for a
// warning.
const uncountedAnswers = 20

// EngineWarnings returns the settings of a worker's engine that keep the router from routing well.
func (p *Pool) EngineWarnings(t time.Time, w *Worker) []Warning {
	info, kind := w.Engine.Info(), p.EngineOf(w).Type
	list := []Warning{}
	switch {
	case info.NoPrefixCache:
		list = append(list, Warning{
			warnPrefixCache, "the engine computes every prompt from its beginning, so routing by overlap gains nothing",
			cmp.Or(prefixCacheFlags[kind], "switch prefix caching on"),
		})
	case w.Engine.uncounted.Load() >= uncountedAnswers:
		list = append(list, Warning{
			warnCachedTokens, "hit ratios are unknown, and the router cannot correct its cache model",
			cmp.Or(cachedTokensFlags[kind], "have the engine report usage.prompt_tokens_details.cached_tokens"),
		})
	}
	if w.eventsCheck.isDoubted() {
		list = append(list, Warning{
			warnDoubted, "the router uses its approximate cache model for an hour",
			"check that the endpoint of kv_events is this engine's own; for models with sliding windows or state spaces, set kv_events off",
		})
	}
	if why := w.events.unfollowed(); why != nil {
		list = append(list, Warning{warnUnfollowed, "the router knows only what it has sent to the engine", why.Error()})
	}
	if advice := p.lacksLoad(t, w, kind); advice != "" {
		list = append(list, Warning{warnNoLoad, "the router does not see what other clients send to the engine", advice})
	}
	if (info.Type != "" || kind == engine.Other) && info.MaxRunning == 0 && p.Settings.Load().Worker(w.Dial).MaxRunning == LimitAuto {
		list = append(list, Warning{
			warnNoLimit, "the worker has no limit, so no request waits in the queue for it",
			cmp.Or(limitFlags[kind], "set max_running to the number of requests that the engine runs at a time"),
		})
	}
	return list
}

// ReviewEngine logs the warnings of a worker's engine and its contradictions to the
// configuration: when they begin, and when they end.
func (p *Pool) ReviewEngine(t time.Time, w *Worker) {
	w.Engine.reviewing.Lock()
	defer w.Engine.reviewing.Unlock()
	list := p.EngineWarnings(t, w)
	for _, text := range p.ContradictionsOf(w) {
		list = append(list, Warning{warnContradicts + ": " + text, "the configuration applies", "correct one of them"})
	}
	w.Engine.warned.Replace(t, list, p.Logger().With(zap.String("upstream", w.Dial)))
}

// CountedCache records whether an answer that generates reports the cached tokens of its
// prompt. Engines may omit a count of 0. An omission therefore says something only if the
// worker was predicted to hold at least two of the engine's blocks.
func (p *Pool) CountedCache(w *Worker, of *Prediction, counted bool) {
	missing := &w.Engine.uncounted
	if counted {
		if missing.Load() > 0 {
			missing.Store(0)
		}
		return
	}
	if missing.Load() >= uncountedAnswers {
		return
	}
	block := int64(p.Settings.Load().BlockSize)
	computed := of.Tokens - int64(of.Shared*float64(block))
	if computed >= 2*max(block, int64(w.Engine.Info().BlockSize)) {
		missing.Add(1)
	}
}
