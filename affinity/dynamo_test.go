package affinity

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestAsDynamo is the tests of Dynamo's session affinity (dynamo-llm 1.3.0-dev.1,
// sticky_sessions.rs) on this store, in their order and with their values. A session that they
// bind already expired is bound here, and its time passes.
func TestAsDynamo(t *testing.T) {
	at := func(worker uint64, rank uint32) kvscore.Target { return kvscore.Target{Worker: worker, Rank: rank} }
	type world struct {
		*testing.T
		r *Ristretto
		c *fakeClock
		l *ends
	}
	bindNew := func(w *world, target kvscore.Target, ttl time.Duration, kind Kind) Binding {
		w.Helper()
		b, ok, err := bind(w.r, "sess", 0, target, ttl, kind)
		if !ok || err != nil {
			w.Fatal(ok, err)
		}
		return b
	}
	resolves := func(w *world, find func(*Ristretto, string) (Binding, bool), target kvscore.Target) {
		w.Helper()
		if b, ok := find(w.r, "sess"); !ok || b.Target != target {
			w.Errorf("resolved to %+v, %v", b, ok)
		}
	}
	unknown := func(w *world) {
		w.Helper()
		if b, ok := get(w.r, "sess"); ok {
			w.Errorf("resolved to %+v", b)
		}
		if b, ok := peek(w.r, "sess"); ok {
			w.Errorf("peeked at %+v", b)
		}
	}
	reported := func(w *world, want ...ended) {
		w.Helper()
		settled(w.T, w.r)
		if got := w.l.take(); len(got) != len(want) || len(want) == 1 && got[0] != want[0] {
			w.Errorf("reported %v, want %v", got, want)
		}
	}
	for _, tt := range []struct {
		name string
		test func(w *world)
	}{
		{"resolve_returns_none_for_unknown_session", unknown},
		{"bind_then_resolve_returns_worker_and_dp_rank", func(w *world) {
			bindNew(w, at(42, 3), 300*time.Second, EngineBacked)
			resolves(w, get, at(42, 3))
		}},
		{"peek_returns_worker_without_refreshing_ttl", func(w *world) {
			b := bindNew(w, at(7, 2), 60*time.Second, EngineBacked)
			w.c.advance(55 * time.Second)
			resolves(w, peek, at(7, 2))
			if got, _ := peek(w.r, "sess"); !got.Expires.Equal(b.Expires) {
				w.Errorf("expires at %v, not %v", got.Expires, b.Expires)
			}
		}},
		{"bind_overwrites_worker_rank_and_ttl", func(w *world) {
			b := bindNew(w, at(1, 0), 10*time.Second, EngineBacked)
			next, ok, _ := bind(w.r, "sess", b.Version, at(2, 3), 90*time.Second, RouterOnly)
			resolves(w, peek, at(2, 3))
			if !ok || next.TTL != 90*time.Second || next.Kind != RouterOnly || next.Expires.Sub(w.c.now()) <= 80*time.Second {
				w.Errorf("bound %+v, %v", next, ok)
			}
		}},
		{"unbind_removes_affinity", func(w *world) {
			b := bindNew(w, at(42, 1), 300*time.Second, EngineBacked)
			got, ok, _ := w.r.Unbind(background, named("sess"), b.Version)
			if !ok || got.Target != at(42, 1) || got.Kind != EngineBacked {
				w.Errorf("removed %+v, %v", got, ok)
			}
			unknown(w)
		}},
		{"expired_entry_returns_none", func(w *world) {
			bindNew(w, at(99, 0), time.Second, EngineBacked)
			w.c.advance(time.Second)
			unknown(w)
		}},
		{"resolve_refreshes_ttl", func(w *world) {
			bindNew(w, at(7, 2), 60*time.Second, EngineBacked)
			w.c.advance(55 * time.Second)
			resolves(w, get, at(7, 2))
			if got, _ := peek(w.r, "sess"); got.Expires.Sub(w.c.now()) <= 50*time.Second {
				w.Errorf("expires in %v", got.Expires.Sub(w.c.now()))
			}
		}},
		{"expired_entry_triggers_close_callback_on_resolve", func(w *world) {
			b := bindNew(w, at(99, 0), time.Second, EngineBacked)
			w.c.advance(2 * time.Second)
			unknown(w)
			reported(w, ended{named("sess"), b.Version, Expired})
		}},
		{"expired_router_only_entry_drops_without_close_callback_on_resolve", func(w *world) {
			bindNew(w, at(11, 0), time.Second, RouterOnly)
			w.c.advance(2 * time.Second)
			unknown(w)
			reported(w)
		}},
		{"expired_lookup_does_not_remove_newer_binding", func(w *world) {
			b := bindNew(w, at(1, 0), time.Second, EngineBacked)
			key := named("sess")
			stale := w.r.find(&key)
			w.c.advance(2 * time.Second)
			bindNew(w, at(2, 1), 300*time.Second, EngineBacked)
			if w.r.visit(stale, w.r.now(), func() {}) {
				w.Error("the expired binding is live")
			}
			resolves(w, peek, at(2, 1))
			// Dynamo's test replaces the binding silently. Here the expired one is reported.
			reported(w, ended{key, b.Version, Expired})
		}},
		{"reaper_triggers_close_callback_for_expired_entry", func(w *world) {
			b := bindNew(w, at(17, 0), 30*time.Second, EngineBacked)
			w.c.advance(31 * time.Second)
			w.r.sweep()
			if w.r.Len() != 0 {
				w.Error("still held")
			}
			reported(w, ended{named("sess"), b.Version, Expired})
		}},
		{"reaper_drops_router_only_entry_without_close_callback", func(w *world) {
			bindNew(w, at(18, 0), 30*time.Second, RouterOnly)
			w.c.advance(31 * time.Second)
			w.r.sweep()
			if w.r.Len() != 0 {
				w.Error("still held")
			}
			reported(w)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, l := new(fakeClock), new(ends)
			tt.test(&world{t, open(t, Options{Clock: c.now, OnExpire: l.record}), c, l})
		})
	}
}
