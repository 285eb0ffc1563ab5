package tests

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// slow has the turns of an engine take about 50 ms a token.
func slow(t testing.TB, e *engine.Engine) {
	t.Helper()
	setFault(t, e, engine.Fault{Kind: engine.Slow, Path: atGenerate, Factor: 800})
}

// holderOf returns the engine that holds a session, and the others.
func holderOf(t testing.TB, engines []*engine.Engine, id string) (home *engine.Engine, others []*engine.Engine) {
	t.Helper()
	i := slices.IndexFunc(engines, func(e *engine.Engine) bool { return open(e, id) > 0 })
	if i < 0 {
		t.Fatalf("no engine holds %s: they did %v", id, did(engines, id))
	}
	return engines[i], slices.Delete(slices.Clone(engines), i, i+1)
}

// running waits until an engine computes n turns of a session, or has a request at a path
// without an end.
func running(t testing.TB, engines []*engine.Engine, path, id string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d requests at %s to be under way", n, path), func() bool {
		found := 0
		for _, e := range engines {
			for _, r := range e.Journal() {
				if r.Path == path && r.Outcome == engine.Running && (r.Session == id || r.Session == "") {
					found++
				}
			}
		}
		return found == n
	})
}

// TestTurnsOfASessionComeOneByOne has several turns at once. SGLang refuses the second.
func TestTurnsOfASessionComeOneByOne(t *testing.T) {
	t.Run("Wait", func(t *testing.T) {
		engines := holders(t, 2, engine.Config{})
		s := startHolding(t, engines)
		s.mustTurn(t, turn{action: "open"})
		home, _ := holderOf(t, engines, "s")
		left := make(chan struct{})
		setFault(t, home, engine.Fault{Kind: engine.Hang, Path: atGenerate, Count: 1, Until: left})
		turns := []asked{s.startTurn(t, turn{stream: true})}
		running(t, engines, atGenerate, "s", 1)
		leaver := s.startTurn(t, turn{})
		for range 2 {
			turns = append(turns, s.startTurn(t, turn{}))
		}
		time.Sleep(100 * time.Millisecond)
		leaver.leave()
		if n := did(engines, "s")[engine.Continued]; n != 1 {
			t.Errorf("%d turns are beside the first one", n-1)
		}
		slow(t, home) // for the engine to meet a turn beside another one
		close(left)
		for _, q := range turns {
			if a := q.wait(t); !a.ok() {
				t.Errorf("status %d, error %v, body %.300q", a.status, a.err, a.body)
			}
		}
		setFault(t, home, engine.Fault{Path: atGenerate})
		s.mustTurn(t, turn{action: "close"})
		closedOnce(t, engines, "s", 1)
		equal(t, did(engines, "s")[engine.Continued], 5, "turns")
		s.booksAtZero(t)
	})
	t.Run("OpensAtOnce", func(t *testing.T) {
		engines := holders(t, 3, engine.Config{})
		s := startHolding(t, engines)
		var opens []asked
		for range 8 {
			opens = append(opens, s.startTurn(t, turn{action: "open"}))
		}
		for _, q := range opens {
			if a := q.wait(t); !a.ok() {
				t.Errorf("status %d, error %v, body %.300q", a.status, a.err, a.body)
			}
		}
		s.mustTurn(t, turn{action: "close"})
		closedOnce(t, engines, "s", 1)
	})
}

// TestClientsThatLeaveTheirSessions has clients leave in each phase. Whatever an engine has
// opened is closed once.
func TestClientsThatLeaveTheirSessions(t *testing.T) {
	engines := holders(t, 2, engine.Config{})
	s := startHolding(t, engines)
	hangs, creeps := engine.Fault{Kind: engine.Hang, Path: atGenerate}, engine.Fault{Kind: engine.Slow, Path: atGenerate, Factor: 800}
	for _, v := range []struct {
		name  string
		fault engine.Fault
		later bool // the session is open before
		u     turn // the client leaves in it
	}{
		{"before-the-answer", hangs, false, turn{action: "open"}},
		{"before-a-stream", hangs, false, turn{action: "open", stream: true}},
		{"in-the-first-stream", creeps, false, turn{action: "open", stream: true, ttl: 1, tokens: 400}},
		{"in-a-stream", creeps, true, turn{stream: true, tokens: 400}},
		{"in-an-answer", creeps, true, turn{tokens: 400}},
		{"in-the-last-turn", creeps, true, turn{action: "close", stream: true, tokens: 400}},
	} {
		t.Run(v.name, func(t *testing.T) {
			if v.later {
				s.mustTurn(t, turn{id: v.name, action: "open", ttl: 1})
			}
			for _, e := range engines {
				setFault(t, e, v.fault)
			}
			v.u.id = v.name
			q := s.startTurn(t, v.u)
			running(t, engines, atGenerate, v.name, 1)
			if v.u.stream && v.fault == creeps {
				time.Sleep(200 * time.Millisecond) // a few tokens
			}
			q.leave()
			for _, e := range engines {
				setFault(t, e, engine.Fault{Path: atGenerate})
			}
			eventually(t, fmt.Sprintf("the sessions to be closed: %v", did(engines, v.name)), func() bool {
				n := did(engines, v.name)
				return n[engine.Opened] == 1 && n[engine.Closed]+n[engine.Deferred] == 1 && n[engine.Unknown] == 0
			})
			s.booksAtZero(t)
			// the id is as good as new
			v.u = turn{id: v.name}
			for _, v.u.action = range []string{"open", "close"} {
				eventually(t, "a new session of the id", func() bool { return s.turn(t, v.u).ok() })
			}
		})
	}
}

// TestFailedTurnsCloseWhatTheyOpened has an engine that opens sessions, and then fails. It is
// the only one until it has failed.
func TestFailedTurnsCloseWhatTheyOpened(t *testing.T) {
	for _, v := range []struct {
		name   string
		fault  engine.Fault
		opened int
		status int
	}{
		{"Refuses", engine.Fault{Kind: engine.Refuse}, 1, 200},
		{"Busy", engine.Fault{Kind: engine.Status, Status: 503, Path: atGenerate}, 2, 200},
		{"HangsUp", engine.Fault{Kind: engine.CloseConn, Path: atGenerate}, 2, 200},
		{"Fails", engine.Fault{Kind: engine.Status, Status: 500, Path: atGenerate}, 1, 500},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := holders(t, 2, engine.Config{})
			s := startHolding(t, engines, "worker "+engines[1].Addr()+" {\ndrain\n}")
			setFault(t, engines[0], v.fault)
			a := s.turn(t, turn{action: "open"})
			if a.status != v.status || a.ok() && a.engine() != "e2" {
				t.Errorf("status %d of %s, error %v, body %.300q", a.status, a.engine(), a.err, a.body)
			}
			if a.ok() {
				s.mustTurn(t, turn{})
				s.mustTurn(t, turn{action: "close"})
			}
			closedOnce(t, engines, "s", v.opened)
			equal(t, s.scrape(t).value(sessions), 0, "bound sessions")
		})
	}
}

// TestKilledWorkersLoseTheirSessions kills the engine of a session. No other engine gets a turn,
// until the client opens the session again.
func TestKilledWorkersLoseTheirSessions(t *testing.T) {
	engines := holders(t, 2, engine.Config{})
	s := startHolding(t, engines)
	s.mustTurn(t, turn{action: "open"})
	home, others := holderOf(t, engines, "s")
	home.Kill()
	for range 2 {
		s.refusedTurn(t, turn{}, http.StatusServiceUnavailable, "no_worker")
	}
	if a := s.mustTurn(t, turn{action: "open"}); a.engine() != others[0].Name() {
		t.Errorf("opened on %s", a.engine())
	}
	revive(t, home)
	if a := s.mustTurn(t, turn{}); a.engine() != others[0].Name() {
		t.Errorf("served by %s", a.engine())
	}
	s.mustTurn(t, turn{action: "close"})
	closedOnce(t, others, "s", 1)
	s.mustTurn(t, turn{}) // it has ended, and is not lost
}

// TestRestartedWorkersLoseTheirSessions restarts the engine of a session between two turns. The
// client gets the engine's own error, and opens the session again.
func TestRestartedWorkersLoseTheirSessions(t *testing.T) {
	engines := holders(t, 1, engine.Config{})
	s := startHolding(t, engines)
	s.mustTurn(t, turn{action: "open"})
	revive(t, engines[0])
	eventually(t, "the engine to be back", func() bool { return s.turn(t, turn{}).status != http.StatusServiceUnavailable })
	if a := s.turn(t, turn{}); a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "does not exist") {
		t.Errorf("status %d, body %.300q", a.status, a.body)
	}
	s.mustTurn(t, turn{action: "open"})
	s.mustTurn(t, turn{})
	s.mustTurn(t, turn{action: "close"})
	eventually(t, "the session to be closed", func() bool { return did(engines, "s")[engine.Closed] == 1 })
}

// TestBindingsThatEndCloseTheirSessions has bindings that end without a last turn.
func TestBindingsThatEndCloseTheirSessions(t *testing.T) {
	engines := holders(t, 3, engine.Config{})
	s := startHolding(t, engines, "journal off", "affinity {\nttl 5m\n}")
	t.Run("Expiry", func(t *testing.T) {
		const n = 16
		var late sync.WaitGroup
		for i := range n {
			u := turn{id: fmt.Sprintf("x%d", i), action: "open", ttl: 1}
			s.mustTurn(t, u)
			ended := time.Now()
			late.Go(func() { // before the store has looked for what has expired, too
				time.Sleep(time.Until(ended.Add(time.Second + time.Duration(i)*30*time.Millisecond)))
				s.refusedTurn(t, turn{id: u.id}, http.StatusGone, "session_lost")
			})
		}
		late.Wait()
		for i := range n {
			closedOnce(t, engines, fmt.Sprintf("x%d", i), 1)
		}
		for _, e := range engines {
			for _, r := range e.Journal() {
				if r.Path == engine.OpenPath && !slices.Contains([]int{1 + 630, 300 + 630}, timeoutOf(t, r)) {
					t.Errorf("opened by %s", r.Body)
				}
			}
		}
	})
	t.Run("Admin", func(t *testing.T) {
		s.mustTurn(t, turn{id: "d", action: "open"})
		if status, text := s.api(t, http.MethodDelete, defaultPool+"/sessions/d", nil, nil); status != http.StatusOK {
			t.Fatalf("status %d: %s", status, text)
		}
		closedOnce(t, engines, "d", 1)
		s.mustTurn(t, turn{id: "d", action: "open"})
		s.mustTurn(t, turn{id: "d", action: "close"})
		closedOnce(t, engines, "d", 2)
	})
	t.Run("Eviction", func(t *testing.T) {
		const n, most = 12, 3
		for i := range n {
			s.mustTurn(t, turn{id: fmt.Sprintf("v%d", i), action: "open"})
		}
		s.mustReload(t, route(engines, "journal off", fmt.Sprintf("affinity {\nttl 5m\nmax_sessions %d\n}", most)))
		eventually(t, "the longest idle to be closed", func() bool {
			left := 0
			for i := range n {
				for _, e := range engines {
					left += open(e, fmt.Sprintf("v%d", i))
				}
			}
			return left == most
		})
		for i := range n {
			s.mustTurn(t, turn{id: fmt.Sprintf("v%d", i), action: "close"})
		}
		for i := range n {
			closedOnce(t, engines, fmt.Sprintf("v%d", i), 1)
		}
	})
	t.Run("PoolEnds", func(t *testing.T) {
		for i := range 3 {
			s.mustTurn(t, turn{id: fmt.Sprintf("p%d", i), action: "open"})
		}
		slow(t, engines[0])
		s.mustReload(t, "respond none")
		for i := range 3 {
			closedOnce(t, engines, fmt.Sprintf("p%d", i), 1)
		}
	})
}

// timeoutOf returns the idle timeout of a session that was opened, in seconds.
func timeoutOf(t testing.TB, r engine.Record) int {
	t.Helper()
	var body struct{ Timeout int }
	if err := json.Unmarshal(r.Body, &body); err != nil {
		t.Error(err)
	}
	return body.Timeout
}
