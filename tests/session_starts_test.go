package tests

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestFirstRequestsOfASessionGoToOneWorker has many first requests of a session come at once,
// with a policy that spreads them. An engine that streams answers at once; one that does not
// answers later than any request waits for another.
func TestFirstRequestsOfASessionGoToOneWorker(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{FirstToken: 300 * time.Millisecond})
	s := startCaddy(t, route(engines, "policy round_robin", "response_headers X-KV-", affinity("hard")))
	for round := range 8 {
		c := ask(fmt.Sprintf("text of round %d", round))
		if round%2 == 0 {
			c = c.streamed()
		}
		key := fmt.Sprint("session-", round)
		answers := make([]answer, 16)
		var wg sync.WaitGroup
		for i := range answers {
			wg.Go(func() { answers[i] = s.chat(t.Context(), c, "X-Session-Id", key) })
		}
		wg.Wait()
		states := make(map[string]int)
		for _, a := range answers {
			states[a.header.Get("X-KV-Session-State")]++
			if !a.ok() || a.engine() != answers[0].engine() {
				t.Fatalf("round %d: served by %s and %s, status %d, %v", round, answers[0].engine(), a.engine(), a.status, a.err)
			}
		}
		if states["new"] != 1 || states["bound"] != len(answers)-1 {
			t.Errorf("round %d: the answers show the states %v", round, states)
		}
	}
	if n := s.scrape(t).value(sessions); n != 8 {
		t.Errorf("%v sessions are bound, want 8", n)
	}
}

// TestQueuedFirstRequestBlocksNoOther has the first request of a session wait for a full
// worker. Another request of the session can go to another worker, and does not wait for the
// first. The session is then bound there. The first request goes to the worker that has its
// model all the same.
func TestQueuedFirstRequestBlocksNoOther(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	s := startCaddy(t, route(engines, "queue", "response_headers X-KV-", affinity("hard"),
		fmt.Sprintf("worker %s {\nid 1\nmax_running 1\nmodels a\n}", engines[0].Addr()),
		fmt.Sprintf("worker %s {\nid 2\nmax_running 1\nmodels b\n}", engines[1].Addr())))
	start := func(model, key string) asked {
		c := ask("hello")
		c.Model = model
		return s.start(t, "/v1/chat/completions", string(c.body()), "X-Session-Id", key)
	}
	busy := start("a", "other")
	eventually(t, 5*time.Second, "the worker is full", func() bool { return gates[0].running.Load() == 1 })
	first := start("a", "s")
	s.wantWaiting(t, 1)
	second := start("b", "s")
	gates[1].pass(t, http.StatusOK)
	if a := second.wait(t); !a.ok() || a.header.Get("X-KV-Worker") != "2" {
		t.Fatalf("the second: status %d of worker %s, %v", a.status, a.header.Get("X-KV-Worker"), a.err)
	}
	s.wantWaiting(t, 1)
	gates[0].pass(t, http.StatusOK)
	busy.wait(t)
	gates[0].pass(t, http.StatusOK)
	if a := first.wait(t); !a.ok() || a.header.Get("X-KV-Worker") != "1" {
		t.Errorf("the first: status %d of worker %s, %v", a.status, a.header.Get("X-KV-Worker"), a.err)
	}
	s.slotsFree(t)
}

// TestFailedFirstRequestBindsNothing has the first request of a session fail. Nothing is bound,
// and a request that came meanwhile goes with the first one's next attempt, wherever that is.
func TestFailedFirstRequestBindsNothing(t *testing.T) {
	for _, status := range []int{http.StatusBadRequest, 0} {
		t.Run(fmt.Sprint(status), func(t *testing.T) { failFirst(t, status) })
	}
}

// failFirst fails the first attempts with a status; 0 breaks the connection.
func failFirst(t *testing.T, status int) {
	engines := startEngines(t, 3, canned.Pace{})
	var gates []*gate
	for _, e := range engines {
		gates = append(gates, hold(e))
	}
	s := startCaddy(t, route(engines, "policy round_robin", affinity("hard")))
	const header = "X-Session-Id"
	first := s.startChat(t, "hello", header, "s")
	var at *gate
	eventually(t, 5*time.Second, "the first to arrive", func() bool {
		for _, g := range gates {
			if g.running.Load() == 1 {
				at = g
			}
		}
		return at != nil
	})
	second := s.startChat(t, "hello", header, "s")
	eventually(t, 5*time.Second, "the second to follow", func() bool { return at.running.Load() == 2 })
	at.pass(t, status)
	at.pass(t, status)
	if status == http.StatusBadRequest { // goes to the client
		for _, q := range []asked{first, second} {
			if a := q.wait(t); a.status != status {
				t.Errorf("status %d, want %d", a.status, status)
			}
		}
		if n := s.scrape(t).value(sessions); n != 0 {
			t.Errorf("%v sessions are bound", n)
		}
		return
	}
	for _, g := range gates {
		g.opened(t)
	}
	a, b := first.wait(t), second.wait(t)
	if !a.ok() || !b.ok() || a.engine() != b.engine() {
		t.Errorf("served by %s and %s, status %d and %d", a.engine(), b.engine(), a.status, b.status)
	}
	if again := s.mustChat(t, ask("hello"), header, "s"); again.engine() != a.engine() {
		t.Errorf("the next turn is served by %s, not %s", again.engine(), a.engine())
	}
}
