package pool

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// warned returns the warnings of a worker's engine that are logged, and the advice of the last one.
func warned(p *Pool, dial string) (list []string, advice string) {
	w, now := p.Worker(dial), time.Now()
	p.ReviewEngine(now, w)
	logged := w.Engine.warned.Open()
	for _, v := range p.EngineWarnings(now, w) {
		if logged[v.What].Times == 0 {
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
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1", MaxRunning: LimitAuto}, WorkerSettings{Dial: "b:1", Engine: engine.Other, MaxRunning: LimitAuto}))
	want := func(dial, advice string, list ...string) {
		t.Helper()
		if got, a := warned(p, dial); !slices.Equal(got, list) || !strings.Contains(a, advice) {
			t.Errorf("%s: warnings %q with the advice %q, want %q with %q", dial, got, a, list, advice)
		}
	}
	want("a:1", "")
	p.tell("a:1", engine.Info{Type: engine.VLLM, NoPrefixCache: true})
	want("a:1", "--max-num-seqs", warnPrefixCache, warnNoLimit)
	p.tell("a:1", engine.Info{Type: engine.SGLang, NoPrefixCache: true, MaxRunning: 3})
	want("a:1", "--disable-radix-cache", warnPrefixCache)
	p.tell("a:1", engine.Info{Type: engine.SGLang, BlockSize: 64, MaxRunning: 3})
	want("a:1", "")
	p.Apply(p.Settings.Load()) // engines of the type other are never asked
	want("b:1", "max_running", warnNoLimit)
	p.Apply(wanted(WorkerSettings{Dial: "a:1"}, WorkerSettings{Dial: "b:1", Engine: engine.Other}).WithDefaults())
	want("b:1", "")
}

// TestMissingCountsAreWarnedOf has answers with and without a count of cached tokens.
// Engines may omit a count of 0.
func TestMissingCountsAreWarnedOf(t *testing.T) {
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}))
	w := p.tell("a:1", engine.Info{Type: engine.VLLM, BlockSize: 32})
	answers := func(n int, of Prediction, counted bool) {
		for range n {
			p.CountedCache(w, &of, counted)
		}
	}
	want := func(what string, list ...string) {
		t.Helper()
		if got, _ := warned(p, "a:1"); !slices.Equal(got, list) {
			t.Errorf("%s: warnings %q, want %q", what, got, list)
		}
	}
	answers(100, Prediction{}, false)
	answers(100, Prediction{Tokens: 63}, false)
	answers(100, Prediction{Tokens: 96, Shared: 2}, false) // still being computed
	want("prompts that may not be cached")
	answers(19, Prediction{Tokens: 64}, false)
	answers(1, Prediction{}, true)
	answers(19, Prediction{Tokens: 64}, false)
	want("a count among them")
	answers(1, Prediction{Tokens: 64}, false)
	want("20 answers", warnCachedTokens)
	if _, advice := warned(p, "a:1"); !strings.Contains(advice, "--enable-prompt-tokens-details") {
		t.Errorf("the advice is %q", advice)
	}
	answers(100, Prediction{Tokens: 640}, false)
	want("many answers", warnCachedTokens)
	answers(1, Prediction{Tokens: 64}, true)
	want("a count")
}

func TestUnnamedPoolsAreComparedByUpstream(t *testing.T) {
	var s SharedSettings
	for _, v := range []struct {
		upstreams, unrelated []string
	}{
		{[]string{"a:1", "b:1"}, nil},
		{[]string{"b:1"}, nil},
		{[]string{"c:1", "a:1"}, nil},
		{[]string{"d:1"}, []string{"a:1", "b:1", "c:1"}},
		{[]string{"c:1", "d:1"}, nil},
	} {
		if got := s.MeetUnnamed(v.upstreams); !slices.Equal(got, v.unrelated) {
			t.Errorf("%v is unrelated to %v, want %v", v.upstreams, got, v.unrelated)
		}
	}
}

func TestIdleQueueIsNoticedOnce(t *testing.T) {
	for _, v := range []struct {
		waiting int
		limit   RequestLimit
		want    bool
	}{
		{0, 0, false},
		{10, 3, false},
		{10, LimitAuto, false},
		{10, 0, true},
	} {
		s := &SharedSettings{All: wanted(WorkerSettings{Dial: AllWorkers, MaxRunning: v.limit})}
		s.All.MaxWaiting = v.waiting
		if got := s.QueueIsIdle(); got != v.want {
			t.Errorf("%d may wait, limit %v: idle %v", v.waiting, v.limit, got)
		}
		if s.QueueIsIdle() {
			t.Error("it is noticed twice")
		}
	}
}
