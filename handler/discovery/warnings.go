package discovery

import (
	"cmp"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
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
	warnMooncake     = "mooncake_port is set, and no bootstrap server of Mooncake names the engine's ranks there"
)

// advices are what the operator can do, by warning and engine type.
var advices = map[string]map[string]string{
	warnPrefixCache: {
		engine.VLLM:   "start vLLM with --enable-prefix-caching",
		engine.SGLang: "start SGLang without --disable-radix-cache",
	},
	warnCachedTokens: {
		engine.VLLM:   "start vLLM with --enable-prompt-tokens-details",
		engine.SGLang: "start SGLang with --enable-cache-report",
	},
	warnNoLimit: {
		engine.VLLM:   "set max_running to vLLM's --max-num-seqs, times its data-parallel ranks",
		engine.TRTLLM: "set max_running to TensorRT-LLM's --max_batch_size",
	},
	warnNoLoad: {
		engine.VLLM:     "let the router read vLLM's /metrics within a second",
		engine.SGLang:   "let the router read SGLang's /v1/loads within a second; set api_key if it needs one",
		engine.LlamaCpp: "start llama.cpp with --metrics",
	},
}

// uncountedAnswers is how many answers in a row must lack a count of cached tokens for a
// warning.
const uncountedAnswers = 20

// Warnings returns the settings of a worker's engine that keep the router from routing well.
func (x *Watch) Warnings(t time.Time) []pool.Warning {
	info, kind := &x.worker.Engine().Info, x.worker.Engine().Type
	list := []pool.Warning{}
	warn := func(what, effect, advice string) {
		list = append(list, pool.Warning{What: what, Effect: effect, Advice: cmp.Or(advices[what][kind], advice)})
	}
	switch {
	case info.NoPrefixCache && !x.worker.IsDecode(): // decode engines of SGLang keep no prompts
		warn(warnPrefixCache, "the engine computes every prompt from its beginning, so routing by overlap gains nothing",
			"switch prefix caching on")
	case x.uncounted.Load() >= uncountedAnswers:
		warn(warnCachedTokens, "hit ratios are unknown, and the router cannot correct its cache model",
			"have the engine report usage.prompt_tokens_details.cached_tokens")
	}
	if x.eventsCheck.isDoubted() {
		warn(warnDoubted, "the router uses its approximate cache model until the engine restarts or kv_events changes",
			"check that the endpoint of kv_events is this engine's own; "+
				"for models with sliding windows or state spaces, set kv_events off")
	}
	if why := x.events.unfollowed(); why != nil {
		warn(warnUnfollowed, "the router knows only what it has sent to the engine", why.Error())
	}
	if x.lacksLoad(t) {
		warn(warnNoLoad, "the router does not see what other clients send to the engine",
			"set engine_load off: engines of this type report no load")
	}
	if e := x.worker.Engine(); x.worker.IsPrefill() && info.Type != "" && !e.HandsOver() {
		warn(warnMooncake, "the worker computes no prompts for other workers",
			"set it to the engine's VLLM_MOONCAKE_BOOTSTRAP_PORT, and dp_size to the ranks that the server names")
	}
	auto := x.pool.Settings.Load().Worker(x.worker.Dial).MaxRunning == pool.LimitAuto
	if auto && (info.Type != "" || kind == engine.Other) && info.MaxRunning == 0 {
		warn(warnNoLimit, "the worker has no limit, so no request waits in the queue for it",
			"set max_running to the number of requests that the engine runs at a time")
	}
	return list
}

// review logs the warnings of the worker's engine and its contradictions to the configuration:
// when they begin, and when they end.
func (x *Watch) review(t time.Time) {
	x.reviewing.Lock()
	defer x.reviewing.Unlock()
	list := x.Warnings(t)
	for _, text := range x.Contradictions() {
		list = append(list, pool.Warning{
			What: warnContradicts + ": " + text, Effect: "the configuration applies", Advice: "correct one of them",
		})
	}
	x.warned.Replace(t, list, x.pool.Logger().With(zap.String("upstream", x.worker.Dial)))
}

// CountedCache records whether an answer that generates reports the cached tokens of its
// prompt. Engines may omit a count of 0. An omission therefore says something only if the
// worker was predicted to hold at least two of the engine's blocks.
func (x *Watch) CountedCache(of *Prediction, counted bool) {
	missing := &x.uncounted
	if counted {
		if missing.Load() > 0 {
			missing.Store(0)
		}
		return
	}
	if missing.Load() >= uncountedAnswers {
		return
	}
	block := int64(x.pool.Settings.Load().BlockSize)
	computed := of.Tokens - int64(of.Shared*float64(block))
	if computed >= 2*max(block, int64(x.worker.Engine().Info.BlockSize)) {
		missing.Add(1)
	}
}
