package speculative

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestOnlyTheNextTurnIsTakenForIt has other requests of a turn's session come
// before what was foreseen of it begins.
func TestOnlyTheNextTurnIsTakenForIt(t *testing.T) {
	none, this, other := affinity.Key{}, affinity.Key{1}, affinity.Key{2}
	first := kvscore.Request{Root: 7, Blocks: []uint64{1, 2, 3}}
	coming := func(key affinity.Key, root uint64, blocks ...uint64) *plan.Plan {
		return &plan.Plan{
			Request: &api.Request{}, Session: plan.Session{Key: key},
			Handling: plan.Handling{Computes: true}, Prompt: plan.Prompt{Score: kvscore.Request{Root: root, Blocks: blocks}},
		}
	}
	counting := coming(this, 7, 1, 2, 3, 4)
	counting.Computes = false
	for _, c := range []struct {
		name   string
		key    affinity.Key // of the turn
		turn   kvscore.Request
		coming *plan.Plan
		ended  bool
	}{
		{"NextTurn", this, first, coming(this, 7, 1, 2, 3, 9, 8), true},
		{"SamePrompt", this, first, coming(this, 7, 1, 2, 3), true},
		{"OtherPrompt", this, first, coming(this, 7, 1, 5, 6, 4), false},
		{"ShorterPrompt", this, first, coming(this, 7, 1, 2), false},
		{"OtherModel", this, first, coming(this, 8, 1, 2, 3, 4), false},
		{"TokensAreCounted", this, first, counting, false},
		{"OtherSession", this, first, coming(other, 7, 1, 2, 3, 4), false},
		{"NoSession", none, first, coming(none, 7, 1, 2, 3, 4), false},
		{"ShortPrompt", this, kvscore.Request{Root: 7}, coming(this, 7), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &Runner{Dispatcher: &dispatch.Dispatcher{Pool: &pool.Pool{}}}
			s := &speculation{r: r, session: c.key, turn: dispatch.Turn{Plan: &plan.Plan{Prompt: plan.Prompt{Score: c.turn}}}}
			if !r.expect(s) {
				t.Fatal("no room")
			}
			r.Arrived(c.coming)
			if ended := s.outcome != ""; ended != c.ended {
				t.Errorf("it has ended: %t, want %t", ended, c.ended)
			}
		})
	}
}
