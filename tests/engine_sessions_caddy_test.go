package tests

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// startHolder starts a Caddy in a process of its own.
func startHolder(t *testing.T, c *child, engines []*engine.Engine, block ...string) {
	t.Helper()
	c.start(t, route(engines, block...))
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
	for i := range 6 {
		if n := did(engines, fmt.Sprint(i)); n[engine.Closed] != 0 {
			t.Errorf("a session was closed at the end: %v", n)
		}
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
	setFault(t, home, engine.Fault{Kind: engine.Status, Status: 500, Path: engine.ClosePath, Count: 2})
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
	equal(t, s.logged(t, "engines fail to close sessions"), 0, "log lines that they are not closed")
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
	noError(t, s.load(route(engines, "policy least_load")))
	if a := under.wait(t); !a.ok() {
		t.Errorf("the turn under way: status %d, error %v", a.status, a.err)
	}
	setFault(t, home, engine.Fault{Path: atGenerate})
	s.mustReload(t, route(engines, "policy least_load", "affinity {\nmode off\n}"))
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

// TestEngineSessionsOverRouters opens sessions in engines at once through several routers. Each is
// opened once, its turns find it through any router, and it is closed once.
// KVROUTER_OPENS is how many there are, 400 by default, ten for each session, at about the same time.
func TestEngineSessionsOverRouters(t *testing.T) {
	takesSeconds(t)
	opens, _ := strconv.Atoi(cmp.Or(os.Getenv("KVROUTER_OPENS"), "400"))
	v := startValkey(t)
	engines := holders(t, 3, engine.Config{})
	routers := startRouters(t, 4, engines, "share "+v.URL(), "queue {\n\tmax_wait 2m\n}")
	for _, r := range routers {
		r.knows(t, engines)
	}
	any := func() *child { return routers[rand.IntN(len(routers))] } //nolint:gosec // a test
	all := func(n int, f func(i int)) {
		var next atomic.Int64
		atOnce(min(n, 64), func(int) { // a router waits a second for the server, which a busy machine delays
			for i := int(next.Add(1)); i <= n; i = int(next.Add(1)) {
				f(i - 1)
			}
		})
	}
	id := func(i int) string { return fmt.Sprint("k", i) }
	sessions := opens / 10
	begun := time.Now()
	all(opens, func(i int) {
		if a := any().turn(t, turn{id: id(i * sessions / opens), action: "open"}); !a.ok() {
			t.Errorf("open: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	t.Logf("%d opens of %d sessions took %v", opens, sessions, time.Since(begun))
	all(sessions, func(i int) {
		if a := any().turn(t, turn{id: id(i)}); !a.ok() {
			t.Errorf("turn: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	for id, n := range didAll(engines) {
		if n[engine.Opened] != 1 || n[engine.Closed]+n[engine.Deferred] != 0 {
			t.Fatalf("session %s: the engines did %v", id, n)
		}
	}
	all(sessions, func(i int) {
		if a := any().turn(t, turn{id: id(i), action: "close"}); !a.ok() {
			t.Errorf("close: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	eventually(t, "all sessions to be closed", func() bool {
		all := didAll(engines)
		left := len(all) != sessions
		for id, n := range all {
			closed := n[engine.Closed] + n[engine.Deferred]
			if n[engine.Opened] != 1 || closed > 1 || n[engine.Unknown]+n[engine.Busy]+n[engine.Closing]+n[engine.Unsupported] > 0 {
				t.Fatalf("session %s: the engines did %v", id, n)
			}
			left = left || closed == 0
		}
		return !left
	})

	// One that is used through another router does not expire before one that nobody uses. It closes once
	// when nobody uses it any more.
	for _, id := range []string{"used", "unused"} {
		routers[0].mustTurn(t, turn{id: id, action: "open", ttl: 3})
	}
	eventually(t, "the unused session to expire", func() bool {
		routers[1].mustTurn(t, turn{id: "used"})
		return did(engines, "unused")[engine.Closed] > 0
	})
	if n := did(engines, "used"); n[engine.Opened] != 1 || n[engine.Closed] != 0 {
		t.Errorf("the session that another router uses: %v", n)
	}
	closedOnce(t, engines, "used", 1)

	// A router that is killed leaves its sessions to the others.
	routers[0].mustTurn(t, turn{id: "left", action: "open"})
	routers[0].end(syscall.SIGKILL)
	routers = routers[1:]
	routers[0].mustTurn(t, turn{id: "left"})
	routers[1].mustTurn(t, turn{id: "left", action: "close"})
	closedOnce(t, engines, "left", 1)

	if !v.Real {
		return
	}
	routers[0].mustTurn(t, turn{id: "certain", action: "open"})
	v.Kill()
	routers[0].refusedTurn(t, turn{id: "certain"}, http.StatusServiceUnavailable, "session_not_opened")
	routers[1].refusedTurn(t, turn{id: "other", action: "open"}, http.StatusServiceUnavailable, "session_not_opened")
	if a := routers[1].turn(t, turn{id: "ordinary"}); !a.ok() {
		t.Errorf("an ordinary session: %d %s", a.status, a.body)
	}
	revive(t, v)
	eventually(t, "the session to go on", func() bool { return routers[0].turn(t, turn{id: "certain"}).ok() })
	routers[0].mustTurn(t, turn{id: "certain", action: "close"})
	closedOnce(t, engines, "certain", 1)
}

// TestEngineSessionsOfOtherRouters has turns through a router that has not used the session, while the
// server is well, has forgotten everything, and is gone. No turn may go where its context is not.
func TestEngineSessionsOfOtherRouters(t *testing.T) {
	takesSeconds(t)
	v := startValkey(t)
	engines := holders(t, 3, engine.Config{})
	r := startRouters(t, 2, engines, "share "+v.URL())
	for _, one := range r {
		one.knows(t, engines)
	}
	for i := range 3 {
		r[0].mustTurn(t, turn{id: fmt.Sprint("expires", i), action: "open", ttl: 5})
		r[1].mustTurn(t, turn{id: fmt.Sprint("expires", i)})
		r[0].mustTurn(t, turn{id: fmt.Sprint("flushed", i), action: "open"})
		r[0].mustTurn(t, turn{id: fmt.Sprint("down", i), action: "open"})
	}
	for i := range 3 {
		closedOnce(t, engines, fmt.Sprint("expires", i), 1)
		for _, one := range r {
			one.refusedTurn(t, turn{id: fmt.Sprint("expires", i)}, http.StatusGone, "session_lost")
		}
		settled(t, engines, fmt.Sprint("expires", i))
	}
	if !v.Real {
		return
	}
	if _, err := v.Ask("FLUSHALL"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the routers to go on", func() bool {
		return r[0].sharing(t).Connected && r[1].sharing(t).Connected
	})
	for i := range 3 {
		id := fmt.Sprint("flushed", i)
		r[1].mustTurn(t, turn{id: id})
		r[1].mustTurn(t, turn{id: id, action: "open"})
		if n := did(engines, id); n[engine.Opened]-n[engine.Closed] != 1 {
			t.Errorf("session %s: the engines did %v", id, n)
		}
	}
	at := func(i int) string { return defaultPool + "/workers/" + engines[i].Addr() }
	drains := func(one *child, i int) bool {
		var w struct{ Draining bool }
		one.api(t, http.MethodGet, at(i), nil, &w)
		return w.Draining
	}
	r[0].api(t, http.MethodPost, at(2)+"/drain", nil, new(any))
	eventually(t, "the other router to drain it", func() bool { return drains(r[1], 2) })
	v.Kill()
	for i := range 3 {
		r[1].refusedTurn(t, turn{id: fmt.Sprint("down", i)}, http.StatusServiceUnavailable, "session_not_opened")
	}
	r[0].api(t, http.MethodPost, at(2)+"/undrain", nil, new(any)) // this, too, is told later
	eventually(t, "the router to notice that nobody hears of it", func() bool { return !r[0].sharing(t).Connected })
	revive(t, v)
	eventually(t, "the end of the drain", func() bool { return !drains(r[0], 2) && !drains(r[1], 2) })
	r[0].api(t, http.MethodPost, at(1)+"/drain", nil, new(any)) // is told after all else
	eventually(t, "the other router to drain another one", func() bool { return drains(r[1], 1) })
	if drains(r[0], 2) || drains(r[1], 2) {
		t.Error("the drain came back")
	}
}

// TestLockOfATurnIsRenewed lets the server forget the lock of a turn that is under way. A turn through
// another router still waits.
func TestLockOfATurnIsRenewed(t *testing.T) {
	takesSeconds(t)
	v := startValkey(t)
	engines := holders(t, 3, engine.Config{Step: engine.StepModel{Base: 500}})
	r := startRouters(t, 2, engines, "share "+v.URL())
	for _, one := range r {
		one.knows(t, engines)
	}
	r[0].mustTurn(t, turn{id: "l", action: "open"})
	body := fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":700,"ignore_eos":true},"stream":true,`+
		`"nvext":{"session_control":{"session_id":"l"}}}`, text)
	first := r[0].server.start(t, atGenerate, body)
	eventually(t, "the first turn to run", func() bool { return did(engines, "l")[engine.Continued] == 1 })
	if _, err := v.Ask("FLUSHALL"); err != nil {
		t.Skip("this server cannot forget")
	}
	eventually(t, "the lock to be renewed", func() bool {
		locks, _ := v.Ask("KEYS", "*turn:*")
		return strings.Contains(locks, "turn:")
	})
	r[1].mustTurn(t, turn{id: "l"})
	if a := first.wait(t); !a.ok() {
		t.Errorf("the first turn: %d, %v, %.200q", a.status, a.err, a.body)
	}
	settled(t, engines, "l") // the engine refuses a turn beside another one
}
