package tests

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestEngineSessionsOverRouters opens sessions in engines at once through several routers. Each is
// opened once, its turns find it through any router, and it is closed once.
// KVROUTER_OPENS is how many there are, 400 by default, ten for each session.
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
		var clients sync.WaitGroup
		for i := range n {
			clients.Go(func() { f(i) })
		}
		clients.Wait()
	}
	id := func(i int) string { return fmt.Sprint("k", i) }
	sessions := opens / 10
	begun := time.Now()
	all(opens, func(i int) {
		if a := any().turn(t, turn{id: id(i % sessions), action: "open"}); !a.ok() {
			t.Errorf("open: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	t.Logf("%d opens of %d sessions took %v", opens, sessions, time.Since(begun))
	all(sessions, func(i int) {
		if a := any().turn(t, turn{id: id(i)}); !a.ok() {
			t.Errorf("turn: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	for i := range sessions {
		if n := did(engines, id(i)); n[engine.Opened] != 1 || n[engine.Closed] != 0 {
			t.Fatalf("session %s: the engines did %v", id(i), n)
		}
	}
	all(sessions, func(i int) {
		if a := any().turn(t, turn{id: id(i), action: "close"}); !a.ok() {
			t.Errorf("close: %d, %v, %.200q", a.status, a.err, a.body)
		}
	})
	for i := range sessions {
		closedOnce(t, engines, id(i), 1)
	}

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
		r[0].mustTurn(t, turn{id: fmt.Sprint("expires", i), action: "open", ttl: 1})
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
