package pool

import (
	"cmp"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"go.uber.org/zap"
)

// EngineWarning is a setting of a worker's engine that keeps the router from routing
// well, and what the operator can do.
type EngineWarning struct {
	What   string `json:"what"`
	Effect string `json:"effect"`
	Advice string `json:"advice"`
}

// What engine warnings say.
const (
	warnPrefixCache  = "prefix caching is off"
	warnCachedTokens = "answers carry no cached-token counts"
	warnDoubted      = "KV events contradict what the engine reports"
	warnUnfollowed   = "the router cannot follow the engine's KV events"
	warnNoLoad       = "engine_load is on, and the engine reports no load"
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

// EngineWarnings returns the warnings that hold of a worker's engine.
func (p *Pool) EngineWarnings(w *Worker) []EngineWarning {
	info, kind := w.Engine.Info(), p.EngineOf(w).Type
	list := []EngineWarning{}
	switch {
	case info.NoPrefixCache:
		list = append(list, EngineWarning{
			warnPrefixCache, "the engine computes every prompt from its beginning, so routing by overlap gains nothing",
			cmp.Or(prefixCacheFlags[kind], "switch prefix caching on"),
		})
	case w.Engine.uncounted.Load() >= uncountedAnswers:
		list = append(list, EngineWarning{
			warnCachedTokens, "hit ratios are unknown, and the router cannot correct its cache model",
			cmp.Or(cachedTokensFlags[kind], "have the engine report usage.prompt_tokens_details.cached_tokens"),
		})
	}
	if cause := p.doubtedCause(w); cause != "" {
		list = append(list, EngineWarning{warnDoubted, "the router uses its approximate cache model for an hour", "likely cause: " + cause})
	}
	if why := w.events.unfollowed(); why != nil {
		list = append(list, EngineWarning{warnUnfollowed, "the router knows only what it has sent to the engine", why.Error()})
	}
	if advice := p.lacksLoad(w, kind); advice != "" {
		list = append(list, EngineWarning{warnNoLoad, "the router does not see what other clients send to the engine", advice})
	}
	if (info.Type != "" || kind == engine.Other) && info.MaxRunning == 0 && p.Settings.Load().Worker(w.Dial).MaxRunning == LimitAuto {
		list = append(list, EngineWarning{
			warnNoLimit, "the worker has no limit, so no request waits in the queue for it",
			cmp.Or(limitFlags[kind], "set max_running to the number of requests that the engine runs at a time"),
		})
	}
	return list
}

// warnOfEngine logs each warning of a worker's engine once, and its end.
func (p *Pool) warnOfEngine(w *Worker) {
	w.Engine.mu.Lock()
	before, now := w.Engine.warnings, p.EngineWarnings(w)
	w.Engine.warnings = now
	w.Engine.mu.Unlock()
	for _, v := range now {
		if !includes(before, v.What) {
			p.Logger().Warn("engine warning: "+v.What, zap.String("upstream", w.Dial), zap.String("effect", v.Effect), zap.String("advice", v.Advice))
		}
	}
	for _, v := range before {
		if !includes(now, v.What) {
			p.Logger().Info("engine warning is over: "+v.What, zap.String("upstream", w.Dial))
		}
	}
}

func includes(list []EngineWarning, what string) bool {
	return slices.ContainsFunc(list, func(v EngineWarning) bool { return v.What == what })
}

// CountedCache records whether an answer that generates reports the cached tokens of its
// prompt. Engines may omit a count of 0. An omission therefore says something only if the
// worker was predicted to hold at least two of the engine's blocks.
func (p *Pool) CountedCache(w *Worker, of *Prediction, counted bool) {
	missing := &w.Engine.uncounted
	if counted {
		if missing.Load() > 0 && missing.Swap(0) >= uncountedAnswers {
			p.warnOfEngine(w)
		}
		return
	}
	if missing.Load() >= uncountedAnswers {
		return
	}
	block := int64(p.Settings.Load().BlockSize)
	computed := of.Tokens - int64(of.Shared*float64(block))
	if computed >= 2*max(block, int64(w.Engine.Info().BlockSize)) && missing.Add(1) == uncountedAnswers {
		p.warnOfEngine(w)
	}
}
