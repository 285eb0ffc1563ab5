package dispatch

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestLastTurnSparesANewerBinding binds a session anew during its last turn. The end of that
// turn removes only the binding that the turn saw.
func TestLastTurnSparesANewerBinding(t *testing.T) {
	for _, anew := range []bool{false, true} {
		h := benchHandler(t)
		store := h.pool.Sessions
		key := affinity.Key{1}
		bind := func(worker uint64) {
			b, _, _ := store.Peek(t.Context(), key)
			want := affinity.Want{Target: kvscore.Target{Worker: worker}, TTL: time.Hour}
			if _, ok, err := store.Bind(t.Context(), key, b.Version, want); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		bind(1)
		d := newTestDispatch(h, &plan.Plan{Session: plan.Session{Key: key, Final: true}})
		if d.findSession(t.Context()); d.bound.Target.Worker != 1 {
			t.Fatalf("bound to %s", d.bound.Target)
		}
		if anew {
			bind(2)
		}
		d.endTurn(true)
		if b, ok, _ := store.Peek(t.Context(), key); ok != anew || anew && b.Target.Worker != 2 {
			t.Errorf("bound anew %v: after the last turn %+v, %v", anew, b, ok)
		}
	}
}
