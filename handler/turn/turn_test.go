package turn

import (
	"errors"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

var (
	key        = affinity.Key{1}
	none       = kvscore.Target{}
	one, other = kvscore.Target{Worker: 1}, kvscore.Target{Worker: 2}
)

// testSessions returns the sessions of a pool of its own.
func testSessions(t *testing.T) *Sessions {
	p, _, _ := testPool(t)
	t.Cleanup(func() { _ = p.Destruct() })
	return &Sessions{Pool: p, Soft: true, Failed: func() { t.Error("the store failed") }}
}

// bindTo binds the session, whatever it is bound to.
func (s *Sessions) bindTo(t *testing.T, want affinity.Want) {
	t.Helper()
	b, _ := s.Pool.Sessions.Peek(key)
	want.TTL = time.Hour
	if _, ok, err := s.Pool.Sessions.Bind(key, b.Version, want); !ok || err != nil {
		t.Fatal(ok, err)
	}
}

// enter begins a turn that must not be refused, and finds its session.
func (s *Sessions) enter(t *testing.T, of plan.Session) *Turn {
	t.Helper()
	of.Key = key
	turn := new(Turn)
	err := s.Enter(t.Context(), turn, &plan.Plan{Session: of, Request: &api.Request{Kind: api.Text}}, false)
	if err != nil {
		t.Fatal(err)
	}
	turn.Find(t.Context())
	return turn
}

// TestStates has each row of the table of states.
func TestStates(t *testing.T) {
	for _, v := range []struct {
		name            string
		bound           kvscore.Target // before
		final           bool
		elsewhere, good bool
		want            State
		after           kvscore.Target
	}{
		{"first turn", none, false, false, true, New, one},
		{"bound", one, false, false, true, Bound, one},
		{"error at the bound target", one, false, false, false, Bound, one},
		{"away", other, false, true, true, Away, other},
		{"error elsewhere", other, false, false, false, Away, other},
		{"moved", other, false, false, true, Moved, one},
		{"error", none, false, false, false, Unbound, none},
		{"last turn", one, true, false, true, Final, none},
		{"last turn of none", none, true, false, true, Final, none},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := testSessions(t)
			if v.bound != none {
				s.bindTo(t, affinity.Want{Target: v.bound})
			}
			turn := s.enter(t, plan.Session{Final: v.final})
			if bound, priced := turn.BoundTarget(); bound != v.bound || !priced {
				t.Errorf("bound to %v, priced %v", bound, priced)
			}
			turn.Choose(one)
			if v.elsewhere {
				turn.ServeElsewhereOnce()
			}
			if got := turn.Commit(one, v.good); got != v.want {
				t.Errorf("state %q, want %q", got, v.want)
			}
			turn.End(true)
			if b, _ := s.Pool.Sessions.Peek(key); b.Target != v.after {
				t.Errorf("bound to %v, want %v", b.Target, v.after)
			}
			if turn.use.Live() != 0 {
				t.Error("the session is still in use")
			}
		})
	}
}

// TestLastTurnOfAHeldSession ends it, unless the turn is refused.
func TestLastTurnOfAHeldSession(t *testing.T) {
	s := testSessions(t)
	for _, sent := range []bool{false, true} {
		b, _ := s.Pool.Sessions.Peek(key)
		if b.Version == 0 {
			s.bindTo(t, affinity.Want{Target: one, Kind: affinity.EngineBacked, EngineSession: "id"})
		}
		turn := s.enter(t, plan.Session{Final: true, EngineSession: "id"})
		if at, held := turn.Held(); at != one || !held {
			t.Fatalf("held by %v: %v", at, held)
		}
		if sent {
			turn.Choose(one)
		}
		turn.End(sent)
		if b, _ := s.Pool.Sessions.Peek(key); (b.Version == 0) != sent {
			t.Errorf("sent %v: bound to %v", sent, b.Target)
		}
	}
}

// TestLastTurnSparesANewerBinding binds a session anew during its last turn.
func TestLastTurnSparesANewerBinding(t *testing.T) {
	s := testSessions(t)
	s.bindTo(t, affinity.Want{Target: one})
	turn := s.enter(t, plan.Session{Final: true})
	s.bindTo(t, affinity.Want{Target: other})
	turn.Choose(one)
	turn.End(true)
	if b, _ := s.Pool.Sessions.Peek(key); b.Target != other {
		t.Errorf("after the last turn, bound to %v", b.Target)
	}
}

// TestSubAgentsStartNearTheirParents has first turns of sessions with a parent.
func TestSubAgentsStartNearTheirParents(t *testing.T) {
	s := testSessions(t)
	parent := affinity.Key{2}
	if _, ok, _ := s.Pool.Sessions.Bind(parent, 0, affinity.Want{Target: other, TTL: time.Hour}); !ok {
		t.Fatal("not bound")
	}
	turn := s.enter(t, plan.Session{Parent: parent})
	if bound, _ := turn.BoundTarget(); bound != none || turn.Warm() != other {
		t.Errorf("bound to %v, warm %v", bound, turn.Warm())
	}
	turn.Commit(one, true)
	turn.End(true)
	if turn = s.enter(t, plan.Session{Parent: parent}); turn.Warm() != one {
		t.Errorf("the second turn begins at %v", turn.Warm())
	}
	turn.End(true)
}

// TestExpiredSessionsAreLost has turns of a session that an engine held until it expired. Only
// its client's open or bind begins it anew.
func TestExpiredSessionsAreLost(t *testing.T) {
	s := testSessions(t)
	held := affinity.Want{Target: one, TTL: time.Second, Kind: affinity.EngineBacked, EngineSession: "s"}
	s.Pool.Closer.Ended(key, &held, affinity.Expired)
	enter := func(a nvext.Action) error {
		turn := new(Turn)
		err := s.Enter(t.Context(), turn, &plan.Plan{Session: plan.Session{Key: key, EngineSession: "s", Action: a}, Request: &api.Request{}}, false)
		if err == nil {
			turn.Find(t.Context())
			if bound, _ := turn.BoundTarget(); bound != none {
				t.Errorf("action %v: it is bound to %v", a, bound)
			}
			turn.End(false)
		}
		return err
	}
	for range 2 {
		if own, ok := errors.AsType[*api.Refusal](enter(0)); !ok || own.Code != api.CodeSessionLost {
			t.Errorf("refused by %v", own)
		}
	}
	if err := errors.Join(enter(nvext.ActionOpen), enter(nvext.ActionBind)); err != nil {
		t.Error(err)
	}
	turn := s.enter(t, plan.Session{})
	turn.Commit(other, true)
	turn.End(true)
	if turn = s.enter(t, plan.Session{EngineSession: "s"}); turn.Warm() != other {
		t.Errorf("begun anew at %v", turn.Warm())
	}
	turn.End(true)
}
