package tests

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestStormOfSessions has 64 clients at once in each of some sessions, for three turns each.
// Then each request has a session of its own, ten times as many as the router keeps. Nobody
// fails, the clients of a session share a worker, and the memory stays bounded.
func TestStormOfSessions(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	const clients, turns, maxSessions = 64, 3, 500
	keys := count(8, 40)
	engines := startEngines(t, 4, canned.Pace{FirstToken: 20 * time.Millisecond})
	s := startCaddy(t, route(engines, "response_headers X-KV-", fmt.Sprintf("affinity {\nmode hard\nmax_sessions %d\n}", maxSessions)))
	s.mustChat(t, ask("hello"))
	before, began := heapInUse(), time.Now()

	var mu sync.Mutex
	homes, states := make(map[int]string), make(map[string]int)
	var failures atomic.Int64
	var storm sync.WaitGroup
	for i := range keys * clients {
		storm.Go(func() {
			key := i % keys
			for turn := range turns {
				a := s.chat(t.Context(), ask(fmt.Sprintf("client %d, turn %d", i, turn)).streamed(), "X-Session-Id", fmt.Sprint("storm-", key))
				if !a.ok() {
					failures.Add(1)
					continue
				}
				mu.Lock()
				if homes[key] == "" {
					homes[key] = a.engine()
				}
				if homes[key] != a.engine() {
					t.Errorf("session %d is on %s, a turn went to %s", key, homes[key], a.engine())
				}
				states[a.header.Get("X-KV-Session-State")]++
				mu.Unlock()
			}
		})
	}
	storm.Wait()
	t.Logf("%d clients, %d sessions: %v in %v, %d failures", keys*clients, keys, states, time.Since(began).Round(time.Millisecond), failures.Load())
	if n := s.scrape(t).value(sessions); failures.Load() != 0 || states["new"] != keys || int(n) != keys {
		t.Errorf("%d failures, the answers show %v, %v sessions are bound, want %d", failures.Load(), states, n, keys)
	}

	began = time.Now()
	var next atomic.Int64
	var flood sync.WaitGroup
	for range 32 {
		flood.Go(func() {
			for n := next.Add(1); n <= 10*maxSessions; n = next.Add(1) {
				if a := s.chat(t.Context(), ask("hello"), "X-Session-Id", fmt.Sprint("flood-", n)); !a.ok() {
					failures.Add(1)
				}
			}
		})
	}
	flood.Wait()
	bound := s.scrape(t).value(sessions)
	t.Logf("%d sessions: %v, %v are bound, heap %+d KiB, %d failures", 10*maxSessions, time.Since(began).Round(time.Millisecond), bound,
		(int64(heapInUse())-int64(before))>>10, failures.Load())
	if failures.Load() != 0 || bound != maxSessions {
		t.Errorf("%d failures, %v sessions are bound, want %d", failures.Load(), bound, maxSessions)
	}
	s.booksAtZero(t)
}
