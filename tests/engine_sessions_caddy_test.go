package tests

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// startHolder starts a Caddy in a process of its own.
func startHolder(t *testing.T, c *child, engines []*engine.Engine, block ...string) {
	t.Helper()
	c.start(t, simulated(engines, block...))
	c.knows(t, engines)
}

// TestSessionsAndTheEndOfCaddy ends a Caddy without a journal. By a signal it closes the sessions. If it is killed, the next one finds them open, and begins them anew.
func TestSessionsAndTheEndOfCaddy(t *testing.T) {
	engines := holders(t, 2, engine.Config{})
	const n = 5
	ids := func(with string) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprint(with, i))
		}
		return list
	}
	c := newChild(t)
	startHolder(t, c, engines, "journal off")
	for _, id := range ids("t") {
		c.mustTurn(t, turn{id: id, action: "open"})
	}
	c.end(syscall.SIGTERM)
	for _, id := range ids("t") {
		closedOnce(t, engines, id, 1)
	}

	engines = engines[:1] // else the next Caddy may open them elsewhere
	startHolder(t, c, engines, "journal off")
	for _, id := range ids("k") {
		c.mustTurn(t, turn{id: id, action: "open"})
	}
	c.end(syscall.SIGKILL)
	startHolder(t, c, engines, "journal off")
	for _, id := range ids("k") {
		if open(engines[0], id) != 1 {
			t.Errorf("%s: the engine did %v", id, did(engines, id))
		}
		c.mustTurn(t, turn{id: id, action: "open"})
		c.mustTurn(t, turn{id: id, action: "close"})
		closedOnce(t, engines, id, 2) // the router closes the old one before it opens the new one
		if n := did(engines, id); n[engine.Exists] != 1 {
			t.Errorf("%s: the engine did %v", id, n)
		}
	}
}

// TestJournaledSessionsStayOpen restarts Caddy. Sessions go on where they were, and
// those that expired meanwhile are closed.
func TestJournaledSessionsStayOpen(t *testing.T) {
	engines := holders(t, 3, engine.Config{})
	c := newChild(t)
	startHolder(t, c, engines)
	for i := range 6 {
		c.mustTurn(t, turn{id: fmt.Sprint(i), action: "open"})
	}
	c.mustTurn(t, turn{id: "short", action: "open", ttl: 1})
	c.end(syscall.SIGTERM)
	if n := did(engines, "short"); n[engine.Closed] != 0 {
		t.Errorf("a session was closed at the end: %v", n)
	}
	time.Sleep(1100 * time.Millisecond)
	startHolder(t, c, engines)
	eventually(t, "the journal to be restored", func() bool { return c.logged(t, "the journal is restored") > 0 })
	for i := range 6 {
		id := fmt.Sprint(i)
		c.mustTurn(t, turn{id: id})
		c.mustTurn(t, turn{id: id, action: "close"})
		closedOnce(t, engines, id, 1)
		checkContext(t, engines, id, 3)
	}
	closedOnce(t, engines, "short", 1)
	c.refusedTurn(t, turn{id: "short"}, http.StatusGone, "session_lost")
}

// TestSessionsOfTwoModels opens a session of one id with two models on one engine, which has one
// session for both. The second is refused, and the first goes on.
func TestSessionsOfTwoModels(t *testing.T) {
	engines := holders(t, 1, engine.Config{SessionsInChat: true})
	s := startHolding(t, engines, "worker * {\nsessions on\n}")
	s.mustTurn(t, turn{action: "open"}) // without a model
	s.refusedTurn(t, turn{path: atChat, action: "open"}, http.StatusConflict, "session_not_opened")
	s.mustTurn(t, turn{})
	s.mustTurn(t, turn{action: "close"})
	closedOnce(t, engines, "s", 1)
	checkContext(t, engines, "s", 3)
}

// TestClosesAreRepeated has an engine that fails to close sessions. Other engines close theirs
// meanwhile, and the client can open the session again when it is closed.
func TestClosesAreRepeated(t *testing.T) {
	engines := holders(t, 2, engine.Config{})
	s := startHolding(t, engines)
	for i := range 6 {
		s.mustTurn(t, turn{id: fmt.Sprint(i), action: "open"})
	}
	home, others := holderOf(t, engines, "0")
	fails(t, home, engine.Fault{Kind: engine.Status, Status: 500, Path: engine.ClosePath, Count: 2})
	for i := range 6 {
		s.mustTurn(t, turn{id: fmt.Sprint(i), action: "close"})
	}
	for i := range 6 {
		eventually(t, "the other engine to close", func() bool { return open(others[0], fmt.Sprint(i)) == 0 })
	}
	if open(home, "0") != 1 {
		t.Error("it is closed although that failed")
	}
	s.mustTurn(t, turn{id: "0", action: "open"})
	s.mustTurn(t, turn{id: "0", action: "close"})
	closedOnce(t, engines, "0", 2)
	for i := 1; i < 6; i++ {
		closedOnce(t, engines, fmt.Sprint(i), 1)
	}
	if got := s.logged(t, "engines fail to close sessions"); got != 0 {
		t.Errorf("logged %d times that they are not closed", got)
	}
}

// TestSessionsOutlastReloads reloads between the turns of a session and in one.
func TestSessionsOutlastReloads(t *testing.T) {
	engines := holders(t, 3, engine.Config{})
	s := startHolding(t, engines)
	s.mustTurn(t, turn{action: "open"})
	home, _ := holderOf(t, engines, "s")
	slow(t, home)
	under := s.startTurn(t, turn{stream: true, tokens: 40})
	running(t, engines, atGenerate, "s", 1)
	if err := s.load(simulated(engines, "policy least_load")); err != nil {
		t.Fatal(err)
	}
	if a := under.wait(t); !a.ok() {
		t.Errorf("the turn under way: status %d, error %v", a.status, a.err)
	}
	fails(t, home, engine.Fault{Path: atGenerate})
	s.mustReload(t, simulated(engines, "policy least_load", "affinity {\nmode off\n}"))
	s.mustTurn(t, turn{})
	s.mustTurn(t, turn{action: "close"})
	closedOnce(t, engines, "s", 1)
	checkContext(t, engines, "s", 4)
}

// TestPinsDoNotMoveSessions has turns with a pin to another worker.
func TestPinsDoNotMoveSessions(t *testing.T) {
	engines := holders(t, 2, engine.Config{Ranks: 2})
	s := startHolding(t, engines, "trust pins",
		fmt.Sprintf("worker %s {\nid 1\n}\nworker %s {\nid 2\n}", engines[0].Addr(), engines[1].Addr()))
	pin := func(worker, rank int) string {
		return fmt.Sprintf(`"backend_instance_id":%d,"dp_rank":%d,`, worker, rank)
	}
	s.mustTurn(t, turn{action: "open", nvext: pin(2, 1)})
	if open(engines[1], "s") != 1 {
		t.Fatalf("the engines did %v, want the session on the second", did(engines, "s"))
	}
	for _, elsewhere := range []string{pin(1, 1), pin(2, 0), `"dp_rank":0,`} {
		s.refusedTurn(t, turn{nvext: elsewhere}, http.StatusBadRequest, "invalid_pin")
	}
	if a := s.mustTurn(t, turn{nvext: pin(2, 1)}); a.engine() != "e2" {
		t.Errorf("served by %s", a.engine())
	}
	if a := s.mustTurn(t, turn{nvext: pin(1, 0), action: "close"}); a.engine() != "e1" {
		t.Errorf("the last turn was served by %s", a.engine())
	}
	closedOnce(t, engines, "s", 1)

	s.mustTurn(t, turn{id: "r", action: "open", nvext: pin(2, 1)})
	s.mustTurn(t, turn{id: "r", action: "close", nvext: `"dp_rank":0,`})
	closedOnce(t, engines, "r", 1)
}

// TestOthersDoNotEndASession has requests with the session's key that are no turns of it.
func TestOthersDoNotEndASession(t *testing.T) {
	engines := holders(t, 3, engine.Config{})
	s := startHolding(t, engines)
	s.mustTurn(t, turn{action: "open", path: atGenerate})
	body := []byte(fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":8}}`, text))
	home, _ := holderOf(t, engines, "s")
	s.api(t, http.MethodPost, defaultPool+"/workers/"+home.Addr()+"/drain", nil, new(adminWorker))
	for range 3 {
		if a := s.post(t.Context(), atGenerate, body, "X-Session-Id", "s"); !a.ok() || a.engine() == home.Name() {
			t.Errorf("status %d of %s, body %.300q", a.status, a.engine(), a.body)
		}
	}
	s.mustTurn(t, turn{})
	s.mustTurn(t, turn{action: "close"})
	closedOnce(t, engines, "s", 1)
	checkContext(t, engines, "s", 3)

	s.mustTurn(t, turn{id: "f", action: "open"}) // unless they say so
	s.post(t.Context(), atGenerate, body, "X-Session-Id", "f", "X-Dynamo-Session-Final", "true")
	closedOnce(t, engines, "f", 1)
}

// TestSessionsInAStorm has clients that open, continue and close the same sessions at once, and
// often leave. In the end, no engine holds a session.
func TestSessionsInAStorm(t *testing.T) {
	engines := holders(t, 3, engine.Config{Ranks: 2})
	s := startHolding(t, engines)
	const ids = 12
	var clients sync.WaitGroup
	for c := range 16 {
		random := rand.New(rand.NewPCG(uint64(c), 17))
		clients.Go(func() {
			for range 20 {
				u := turn{id: fmt.Sprint(random.IntN(ids)), stream: random.IntN(2) == 0, ttl: 1}
				u.action = []string{"open", "open", "", "", "", "close"}[random.IntN(6)]
				ctx, leave := context.WithCancel(t.Context())
				if random.IntN(3) == 0 {
					time.AfterFunc(time.Duration(random.IntN(8000))*time.Microsecond, leave)
				}
				a := s.post(ctx, u.where(), []byte(u.body()))
				// the engine may not have noticed yet that the client before has left
				late := bytes.Contains(a.body, []byte("already has an active request")) || bytes.Contains(a.body, []byte("close was requested"))
				if a.err == nil && !slices.Contains([]int{200, 410}, a.status) && !late {
					t.Errorf("%+v: status %d, body %.300q", u, a.status, a.body)
				}
				leave()
			}
		})
	}
	clients.Wait()
	opened := 0
	for i := range ids {
		id := fmt.Sprint(i)
		eventually(t, fmt.Sprintf("session %s to be closed: %v", id, did(engines, id)), func() bool {
			// A deferred close may be followed by another: an open finds the session still there.
			return !slices.ContainsFunc(engines, func(e *engine.Engine) bool { return open(e, id) > 0 })
		})
		opened += did(engines, id)[engine.Opened]
	}
	t.Logf("%d sessions were opened", opened)
	s.booksAtZero(t)
}
