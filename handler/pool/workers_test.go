package pool

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// TestAddressesOfRequestsAreBounded uses more addresses than the pool keeps apart, as from a
// placeholder that a client fills in. Some addresses are invalid.
func TestAddressesOfRequestsAreBounded(t *testing.T) {
	s := wanted(worker.Settings{Dial: "static:1"})
	s.Others = true
	p := testPool(t, s)
	for _, dial := range []string{"", "127.0.0.1:9\xff", "\xff:9", "a:1-100", "a:b", strings.Repeat("a", 600) + ":1"} {
		if w := p.Worker(dial); w != p.overflow {
			t.Errorf("%q became the worker %q", dial, w.Dial)
		}
	}
	old := time.Now().Add(-time.Minute).Unix()
	busy, drained := p.Worker("busy:1"), p.Worker("drained:1")
	lease := p.serve(busy)
	drained.AskDrain(true)
	for i := range 3 * maxOverflow {
		w := p.Worker(fmt.Sprintf("host-%d:1", i))
		if i < maxOverflow/2 {
			w.See(old)
		}
	}
	busy.See(old)
	if n := len(p.All()); n > maxOverflow+1 {
		t.Errorf("%d workers are known", n)
	}
	if w := p.Worker("one-more:1"); w != p.overflow {
		t.Errorf("with %d workers in use, there is room for %s", len(p.All()), w.Dial)
	}
	l := p.serve(p.overflow)
	l.End(true, nil)
	if n := p.cached(p.overflow); n > 0 {
		t.Errorf("what is not told apart is thought to hold %d tokens", n)
	}
	for _, w := range p.All() {
		w.See(old)
	}
	p.swept = time.Time{}
	if w := p.Worker("one-more:1"); w == p.overflow {
		t.Error("there is no room though nothing is in use")
	}
	for _, w := range []*worker.Worker{busy, drained, p.Worker("static:1")} {
		if p.Known(w.Dial) != w {
			t.Errorf("%s was forgotten", w.Dial)
		}
	}
	lease.End(true, nil)
}

// TestRemovedWorkerIsForgottenWithoutTraffic takes an upstream out of the
// configuration of a pool that serves nothing.
func TestRemovedWorkerIsForgottenWithoutTraffic(t *testing.T) {
	p := testPool(t, wanted(worker.Settings{Dial: "a:1"}, worker.Settings{Dial: "b:1"}))
	b := p.Worker("b:1")
	b.See(time.Now().Add(-time.Hour).Unix())
	if !p.IsUpstream(p.Settings.Load(), b) {
		t.Error("an upstream is said to be none")
	}
	p.Apply(wanted(worker.Settings{Dial: "a:1"}).WithDefaults())
	if p.IsUpstream(p.Settings.Load(), b) {
		t.Error("what was removed is said to be an upstream")
	}
	p.forget(time.Now().Add(WorkerGrace - time.Minute))
	if p.Known("b:1") == nil {
		t.Error("forgotten before its time")
	}
	p.forget(time.Now().Add(WorkerGrace + time.Minute))
	if p.Known("b:1") != nil {
		t.Error("remembered for ever")
	}
}

// TestNothingIsKeptOfUnnamedWorkersThoughManyGo retires more targets than the
// scheduler remembers as retired.
func TestNothingIsKeptOfUnnamedWorkersThoughManyGo(t *testing.T) {
	p := testPool(t, wanted())
	for id := range uint64(3000) {
		p.Scheduler.Retire(kvscore.Target{Worker: id + 1})
	}
	p.forget(time.Now())
	p.serve(p.overflow).End(true, nil)
	if n := p.cached(p.overflow); n != -1 {
		t.Errorf("%d tokens are kept", n)
	}
}

// TestEqualModelListIsNoNews records the same list again, then one with the same models
// and other entries.
func TestEqualModelListIsNoNews(t *testing.T) {
	list := func(raw string) *worker.ModelList {
		return &worker.ModelList{IDs: map[string]bool{"x": true}, Entries: []worker.ModelEntry{{ID: "x", Raw: raw}}}
	}
	p, first, other := testPool(t, wanted()), list("1"), list("2")
	w := p.Worker(one)
	for i, v := range []struct{ own, want *worker.ModelList }{{first, first}, {list("1"), first}, {other, other}, {nil, nil}, {first, first}} {
		p.LearnModels(w, v.own, zap.NewNop())
		if w.List() != v.want {
			t.Errorf("step %d: another list than wanted", i)
		}
	}
}
