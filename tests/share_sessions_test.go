package tests

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
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

	// One that is used through another router does not expire, and closes once when nobody uses it.
	routers[0].mustTurn(t, turn{id: "short", action: "open", ttl: 2})
	for range 4 {
		time.Sleep(time.Second)
		routers[1].mustTurn(t, turn{id: "short"})
	}
	if n := did(engines, "short"); n[engine.Opened] != 1 || n[engine.Closed] != 0 {
		t.Errorf("the session that another router uses: %v", n)
	}
	closedOnce(t, engines, "short", 1)

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
	if err := v.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the session to go on", func() bool { return routers[0].turn(t, turn{id: "certain"}).ok() })
	routers[0].mustTurn(t, turn{id: "certain", action: "close"})
	closedOnce(t, engines, "certain", 1)
}
