package speculative

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestOnlyTheNextTurnIsTakenForIt has other requests of a turn's session come
// before what was foreseen of it begins.
func TestOnlyTheNextTurnIsTakenForIt(t *testing.T) {
	first := kvscore.Request{Root: 7, Blocks: []uint64{1, 2, 3}}
	coming := func(key string, root uint64, blocks ...uint64) *plan.Plan {
		return &plan.Plan{
			Request: &api.Request{}, Session: plan.Session{Key: key},
			Handling: plan.Handling{Computes: true}, Prompt: plan.Prompt{Score: kvscore.Request{Root: root, Blocks: blocks}},
		}
	}
	counting := coming("s", 7, 1, 2, 3, 4)
	counting.Computes = false
	for _, c := range []struct {
		name   string
		key    string // of the turn
		turn   kvscore.Request
		coming *plan.Plan
		ended  bool
	}{
		{"NextTurn", "s", first, coming("s", 7, 1, 2, 3, 9, 8), true},
		{"SamePrompt", "s", first, coming("s", 7, 1, 2, 3), true},
		{"OtherPrompt", "s", first, coming("s", 7, 1, 5, 6, 4), false},
		{"ShorterPrompt", "s", first, coming("s", 7, 1, 2), false},
		{"OtherModel", "s", first, coming("s", 8, 1, 2, 3, 4), false},
		{"TokensAreCounted", "s", first, counting, false},
		{"OtherSession", "s", first, coming("other", 7, 1, 2, 3, 4), false},
		{"NoSession", "", first, coming("", 7, 1, 2, 3, 4), false},
		{"ShortPrompt", "s", kvscore.Request{Root: 7}, coming("s", 7), true},
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
