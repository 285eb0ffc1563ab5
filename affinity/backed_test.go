package affinity

import (
	"fmt"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestEngineSessionsComeWithTheirBindings binds, renews, replaces and ends engine-backed
// bindings. Reads and reports have the engine's id, and nothing else remembers it.
func TestEngineSessionsComeWithTheirBindings(t *testing.T) {
	c, l := new(fakeClock), new(ends)
	r := open(t, Options{Clock: c.now, OnExpire: l.record, MaxSessions: 8})
	backed := func(id string) Want {
		return Want{Target: kvscore.Target{Worker: 1}, TTL: time.Minute, Kind: EngineBacked, EngineSession: id}
	}
	wantHeld := func(n int) {
		t.Helper()
		if got := len(r.EngineBacked()); got != n {
			t.Errorf("%d engine-backed sessions, want %d", got, n)
		}
	}
	key := named("s")
	b, _, err := r.Bind(t.Context(), key, 0, backed("a"))
	if err != nil || b.EngineSession != "a" {
		t.Fatalf("%+v, %v", b, err)
	}
	if got, ok, _ := r.Get(t.Context(), key); !ok || got.EngineSession != "a" {
		t.Errorf("read %+v", got)
	}
	b, _, _ = r.Bind(t.Context(), key, b.Version, backed("b"))
	wantHeld(1)
	b, _, _ = r.Bind(t.Context(), key, b.Version, Want{Target: kvscore.Target{Worker: 1}, TTL: time.Minute})
	if b.EngineSession != "" {
		t.Errorf("a binding of the router only has the engine's session %q", b.EngineSession)
	}
	wantHeld(0)
	b, _, _ = r.Bind(t.Context(), key, b.Version, backed("c"))
	if got, ok, _ := r.Unbind(t.Context(), key, b.Version); !ok || got.EngineSession != "c" {
		t.Errorf("unbound %+v", got)
	}
	wantHeld(0)
	for i := range 20 {
		if _, _, err := r.Bind(t.Context(), named(fmt.Sprint(i)), 0, backed(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	wantHeld(r.Len())
	c.advance(2 * time.Minute)
	r.sweep()
	wantHeld(0)
	eventually(t, "all to be reported", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.full) == 20 })
	seen := make(map[string]bool)
	for _, b := range l.full {
		seen[b.EngineSession] = true
	}
	if len(seen) != 20 {
		t.Errorf("the reports name %d sessions of the engine, want 20", len(seen))
	}
}

// TestAloneKeepsOthersOut has two requests that want a session alone, and one that does not.
func TestAloneKeepsOthersOut(t *testing.T) {
	s := NewSessions(open(t, Options{}))
	var first, second, other Use
	key := named("s")
	for _, u := range []*Use{&first, &second, &other} {
		s.Begin(u, key)
	}
	if ok, err := first.Alone(t.Context(), 0); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := second.Alone(t.Context(), time.Millisecond); ok || err != nil {
		t.Error("two have the session alone", err)
	}
	_ = other.End(t.Context(), 0)
	got := make(chan bool)
	go func() {
		ok, _ := second.Alone(t.Context(), time.Minute)
		got <- ok
	}()
	_ = first.End(t.Context(), 0)
	if !<-got {
		t.Error("the second does not get the session after the first")
	}
	_ = second.End(t.Context(), 0)
	if s.Live() != 0 {
		t.Error("a session is still live")
	}
}
