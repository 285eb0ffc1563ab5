package discovery

import (
	"cmp"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
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
	warnUnlisted     = "the worker does not list its models"
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

// Warnings returns the settings of a worker's engine that keep the router from routing well.
func Warnings(w *worker.Worker, t time.Time) []observe.Warning {
	e := w.Engine()
	info, kind := &e.Info, e.Type
	list := []observe.Warning{}
	warn := func(what, effect, advice string) {
		list = append(list, observe.Warning{What: what, Effect: effect, Advice: cmp.Or(advices[what][kind], advice)})
	}
	switch {
	case info.NoPrefixCache && !w.IsDecode(): // decode engines of SGLang keep no prompts
		warn(warnPrefixCache, "the engine computes every prompt from its beginning, so routing by overlap gains nothing",
			"switch prefix caching on")
	case w.OmitsCounts():
		warn(warnCachedTokens, "hit ratios are unknown, and the router cannot correct its cache model",
			"have the engine report usage.prompt_tokens_details.cached_tokens")
	}
	switch status := w.ListingStatus(); {
	case w.HasConfiguredModels():
	case w.RefusesModels():
		warn(warnUnlisted, fmt.Sprintf("GET /v1/models answers %d: requests for any model go there, and the router asks again in 5 minutes", status),
			"set worker api_key or worker models")
	case status == http.StatusBadRequest:
		warn(warnUnlisted, "GET /v1/models answers 400: requests for any model go there",
			"look at what listens there: https:// before the address is missing if it speaks TLS")
	}
	if w.DoubtsEvents() {
		warn(warnDoubted, "the router uses its approximate cache model until the engine restarts or kv_events changes",
			"check that the endpoint of kv_events is this engine's own; "+
				"for models with sliding windows or state spaces, set kv_events off")
	}
	if why := w.Unfollowed(); why != nil {
		warn(warnUnfollowed, "the router knows only what it has sent to the engine", why.Error())
	}
	if lacksLoad(w, t) {
		warn(warnNoLoad, "the router does not see what other clients send to the engine",
			"set engine_load off: engines of this type report no load")
	}
	if w.IsPrefill() && info.Type != "" && !e.CanTransfer() {
		warn(warnMooncake, "the worker computes no prompts for other workers",
			"set it to the engine's VLLM_MOONCAKE_BOOTSTRAP_PORT, and dp_size to the ranks that the server names")
	}
	auto := w.Settings().MaxRunning == worker.LimitAuto
	if auto && (info.Type != "" || kind == engine.Other) && info.MaxRunning == 0 {
		warn(warnNoLimit, "the worker has no limit, so no request waits in the queue for it",
			"set max_running to the number of requests that the engine runs at a time")
	}
	return list
}

// review logs the warnings of the worker's engine and its contradictions to the configuration:
// when they begin, and when they end.
func review(p *pool.Pool, w *worker.Worker, t time.Time) {
	list := Warnings(w, t)
	for _, text := range Contradictions(p, w) {
		list = append(list, observe.Warning{
			What: warnContradicts + ": " + text, Effect: "the configuration applies", Advice: "correct one of them",
		})
	}
	w.Warned.Replace(t, list, p.Logger().With(zap.String("upstream", w.Dial)))
}
