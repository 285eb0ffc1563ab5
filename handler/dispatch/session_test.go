package dispatch

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestLastTurnSparesANewerBinding has a session bound anew while its last turn
// is under way: the end of that turn removes the binding that it saw, no other.
func TestLastTurnSparesANewerBinding(t *testing.T) {
	for _, anew := range []bool{false, true} {
		h := benchHandler(t)
		store := h.pool.Sessions
		bind := func(worker uint64) {
			if _, err := store.Put("s", kvscore.Target{Worker: worker}, time.Hour, affinity.RouterOnly); err != nil {
				t.Fatal(err)
			}
		}
		bind(1)
		d := newTestDispatch(h, &plan.Plan{Session: plan.Session{Key: "s", Final: true}})
		if at := d.boundTo(); at.Worker != 1 {
			t.Fatalf("bound to %s", at)
		}
		if anew {
			bind(2)
		}
		d.endTurn(true)
		if b, ok := store.Peek("s"); ok != anew || anew && b.Target.Worker != 2 {
			t.Errorf("bound anew %v: after the last turn %+v, %v", anew, b, ok)
		}
	}
}
