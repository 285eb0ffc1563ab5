package discovery

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// warned returns the warnings of a worker's engine that are logged, and the advice of the last one.
func warned(p *pool.Pool, dial string) (list []string, advice string) {
	w, now := p.Worker(dial), time.Now()
	review(p, w, now)
	logged := w.Warned.Open(now)
	for _, v := range Warnings(p, w, now) {
		if !slices.ContainsFunc(logged, func(in observe.Incident) bool { return in.What == v.What }) {
			v.What += " is not logged"
		}
		list, advice = append(list, v.What), v.Advice
	}
	if len(logged) != len(list) {
		list = append(list, "others are logged")
	}
	return list, advice
}

func TestEngineWarningsFollowTheEngine(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1", MaxRunning: worker.LimitAuto}, worker.Settings{Dial: "b:1", Engine: engine.Other, MaxRunning: worker.LimitAuto}))
	want := func(dial, advice string, list ...string) {
		t.Helper()
		if got, a := warned(p, dial); !slices.Equal(got, list) || !strings.Contains(a, advice) {
			t.Errorf("%s: warnings %q with the advice %q, want %q with %q", dial, got, a, list, advice)
		}
	}
	want("a:1", "")
	tell(p, "a:1", engine.Info{Type: engine.VLLM, NoPrefixCache: true})
	want("a:1", "--max-num-seqs", warnPrefixCache, warnNoLimit)
	tell(p, "a:1", engine.Info{Type: engine.SGLang, NoPrefixCache: true, MaxRunning: 3})
	want("a:1", "--disable-radix-cache", warnPrefixCache)
	tell(p, "a:1", engine.Info{Type: engine.SGLang, BlockSize: 64, MaxRunning: 3})
	want("a:1", "")
	Apply(p, p.Settings.Load()) // engines of the type other are never asked
	want("b:1", "max_running", warnNoLimit)
	Apply(p, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1", Engine: engine.Other}).WithDefaults())
	want("b:1", "")
}

// TestMissingCountsAreWarnedOf has answers with and without a count of cached tokens.
// Engines may omit a count of 0.
func TestMissingCountsAreWarnedOf(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}))
	w := tell(p, "a:1", engine.Info{Type: engine.VLLM, BlockSize: 32})
	answers := func(n int, of worker.Prediction, counted bool) {
		for range n {
			w.CountedCache(&of, counted, p.Settings.Load().BlockSize)
		}
	}
	want := func(what string, list ...string) {
		t.Helper()
		if got, _ := warned(p, "a:1"); !slices.Equal(got, list) {
			t.Errorf("%s: warnings %q, want %q", what, got, list)
		}
	}
	answers(100, worker.Prediction{}, false)
	answers(100, worker.Prediction{Tokens: 63}, false)
	answers(100, worker.Prediction{Tokens: 96, Shared: 2}, false) // still being computed
	want("prompts that may not be cached")
	answers(19, worker.Prediction{Tokens: 64}, false)
	answers(1, worker.Prediction{}, true)
	answers(19, worker.Prediction{Tokens: 64}, false)
	want("a count among them")
	answers(1, worker.Prediction{Tokens: 64}, false)
	want("20 answers", warnCachedTokens)
	if _, advice := warned(p, "a:1"); !strings.Contains(advice, "--enable-prompt-tokens-details") {
		t.Errorf("the advice is %q", advice)
	}
	answers(100, worker.Prediction{Tokens: 640}, false)
	want("many answers", warnCachedTokens)
	answers(1, worker.Prediction{Tokens: 64}, true)
	want("a count")
}
