package handler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestAddressesOfRequestsAreBounded has more addresses come than are told apart,
// as from a placeholder that a client fills in, and some that are none.
func TestAddressesOfRequestsAreBounded(t *testing.T) {
	s := wanted(workerSettings{Dial: "static:1"})
	s.others = true
	p := testPool(t, s)
	for _, dial := range []string{"", "127.0.0.1:9\xff", "\xff:9", "a:1-100", "a:b", strings.Repeat("a", 600) + ":1"} {
		if w := p.worker(dial); w != p.unnamed {
			t.Errorf("%q became the worker %q", dial, w.dial)
		}
	}
	old := time.Now().Add(-time.Hour).Unix()
	busy, drained := p.worker("busy:1"), p.worker("drained:1")
	lease := p.serve(busy)
	drained.drain.Or(drainAsked)
	for i := range 3 * maxOthers {
		w := p.worker(fmt.Sprintf("host-%d:1", i))
		if i < maxOthers/2 {
			w.seen.Store(old)
		}
	}
	busy.seen.Store(old)
	if n := len(p.all()); n > maxOthers+1 {
		t.Errorf("%d workers are known", n)
	}
	if w := p.worker("one-more:1"); w != p.unnamed {
		t.Errorf("with %d workers in use, there is room for %s", len(p.all()), w.dial)
	}
	l := p.serve(p.unnamed)
	l.End(true, nil)
	if n := p.cached(p.unnamed); n > 0 {
		t.Errorf("what is not told apart is thought to hold %d tokens", n)
	}
	for _, w := range p.all() {
		w.seen.Store(old)
	}
	p.swept = time.Time{}
	if w := p.worker("one-more:1"); w == p.unnamed {
		t.Error("there is no room though nothing is in use")
	}
	for _, w := range []*worker{busy, drained, p.worker("static:1")} {
		if p.known(w.dial) != w {
			t.Errorf("%s was forgotten", w.dial)
		}
	}
	lease.End(true, nil)
}

// TestRemovedWorkerIsForgottenWithoutTraffic takes an upstream out of the
// configuration of a pool that serves nothing.
func TestRemovedWorkerIsForgottenWithoutTraffic(t *testing.T) {
	p := testPool(t, wanted(workerSettings{Dial: "a:1"}, workerSettings{Dial: "b:1"}))
	b := p.worker("b:1")
	b.seen.Store(time.Now().Add(-time.Hour).Unix())
	if !p.isCurrent(p.settings.Load(), b) {
		t.Error("an upstream is said to be none")
	}
	p.apply(wanted(workerSettings{Dial: "a:1"}).withDefaults())
	if p.isCurrent(p.settings.Load(), b) {
		t.Error("what was removed is said to be an upstream")
	}
	p.forget(time.Now().Add(workerGrace - time.Minute))
	if p.known("b:1") == nil {
		t.Error("forgotten before its time")
	}
	p.forget(time.Now().Add(workerGrace + time.Minute))
	if p.known("b:1") != nil {
		t.Error("remembered for ever")
	}
}

// TestNothingIsKeptOfUnnamedWorkersThoughManyGo retires more targets than the
// scheduler remembers as retired.
func TestNothingIsKeptOfUnnamedWorkersThoughManyGo(t *testing.T) {
	p := testPool(t, wanted())
	for id := range uint64(3000) {
		p.scheduler.Retire(kvscore.Target{Worker: id + 1})
	}
	p.forget(time.Now())
	p.serve(p.unnamed).End(true, nil)
	if n := p.cached(p.unnamed); n != -1 {
		t.Errorf("%d tokens are kept", n)
	}
}
