package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// adopt makes the first request of a new configuration, by which its pool adopts the
// settings.
func (s *server) adopt(t testing.TB, site string) {
	t.Helper()
	s.mustReload(t, site)
	if status, _, err := s.get(t.Context(), s.url+"/adopted"); err != nil || status != http.StatusOK {
		t.Fatalf("status %d, error %v", status, err)
	}
}

func runs(t testing.TB, g *gate, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s has %d requests", g.name, n), func() bool { return g.running.Load() == n })
}

// TestLimitsChangeWhileRequestsWait raises the limit by a reload, then lowers it.
func TestLimitsChangeWhileRequestsWait(t *testing.T) {
	h := startGated(t, 1)
	g := h.gates[0]
	all := h.startChats(t, 6)
	h.wantWaiting(t, 5)
	h.adopt(t, route(h.engines, maxRunning(4)))
	h.wantWaiting(t, 2)
	runs(t, g, 4)
	h.adopt(t, route(h.engines, maxRunning(2)))
	if w := h.workers(t)[0]; w.Load.Max == nil || *w.Load.Max != 2 || w.Load.Running != 4 {
		t.Errorf("the admin API says %+v, want 4 running of 2", w)
	}
	all = append(all, h.startChat(t, "after the reload"))
	h.wantWaiting(t, 3)
	for range 2 { // it may keep what it has, and gets no more
		g.pass(t, http.StatusOK)
	}
	runs(t, g, 2)
	h.wantWaiting(t, 3)
	g.pass(t, http.StatusOK)
	h.wantWaiting(t, 2)
	runs(t, g, 2)
	h.adopt(t, route(h.engines)) // no limit
	h.wantWaiting(t, 0)
	runs(t, g, 4)
	h.finish(t, all...)
}

// TestEngineDiesWhileRequestsWait kills the engine that requests wait for. They go to the
// other engine, or get an answer soon if there is none.
func TestEngineDiesWhileRequestsWait(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprintf("Engines=%d", n), func(t *testing.T) {
			h := startGated(t, n, maxRunning(2))
			all := h.startChats(t, 2*n+8)
			h.wantWaiting(t, 8)
			h.engines[0].Kill()
			if n > 1 {
				h.gates[1].opened(t)
				h.wantServed(t, "e2", all...)
				return
			}
			for i, q := range all {
				if a := q.wait(t); !strings.Contains(string(a.body), "no_worker") && !strings.Contains(string(a.body), "worker_failed") {
					t.Errorf("request %d: status %d, body %s", i, a.status, a.body)
				}
			}
			h.slotsFree(t)
		})
	}
}

// TestUnhealthyWorkerIsNotWaitedFor fails Caddy's health checks of the only worker while
// requests wait for it.
func TestUnhealthyWorkerIsNotWaitedFor(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, "kv_router {\n"+maxRunning(1)+"\nreverse_proxy "+engines[0].Addr()+" {\nhealth_uri /ill\nhealth_interval 100ms\n}\n}")
	g := hold(engines[0])
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			g.serve(w, r)
		} else if g.running.Load() > 0 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	served := s.startChat(t, "one")
	runs(t, g, 1)
	if a := s.startChat(t, "two").wait(t); !strings.Contains(string(a.body), "no_worker") {
		t.Errorf("status %d, body %s; want no_worker", a.status, a.body)
	}
	g.pass(t, http.StatusOK)
	s.wantServed(t, "", served)
}

// TestHardSessionWaitsForItsWorker fills a session's worker with affinity mode hard. A turn
// waits for that worker, and no longer than the queue allows.
func TestHardSessionWaitsForItsWorker(t *testing.T) {
	h := startGated(t, 2, affinity("hard"), "queue {\nmax_wait 100ms\n}")
	turn := func() asked { return h.startChat(t, "a turn", "X-Session-Id", "s") }
	first := turn()
	h.awaitRunning(t, 1)
	home := h.engines[h.gates[1].running.Load()].Name()
	wantTurnedAway(t, turn().wait(t), http.StatusServiceUnavailable, "queue_timeout", "server_error")
	h.mustReload(t, route(h.engines, affinity("hard"), maxRunning(1)))
	second := turn()
	h.wantWaiting(t, 1)
	other := h.startChat(t, "no session") // which goes to the idle one
	h.awaitRunning(t, 2)
	h.finish(t, first, other)
	h.wantServed(t, home, second)
}

// TestClientGoneLeavesNoSlotTaken has clients leave the queue, and between two attempts.
func TestClientGoneLeavesNoSlotTaken(t *testing.T) {
	h := startGated(t, 2)
	before := h.scrape(t)
	all := h.startChats(t, 2)
	h.awaitRunning(t, 2)
	gone := h.startChat(t, "waits")
	h.wantWaiting(t, 1)
	gone.leave()
	h.wantWaiting(t, 0)
	h.gates[0].pass(t, http.StatusServiceUnavailable) // held back
	h.wantWaiting(t, 1)
	all[0].leave()
	all[1].leave()
	h.slotsFree(t)
	h.finish(t, h.startChat(t, "and now?"))
	h.wantFigures(t, before, []figure{
		{requestsTotal, []string{`outcome="client_gone"`}, 3},
		{requestsTotal, []string{`outcome="ok"`}, 1},
		{queueRejected, nil, 0},
	})
}

// TestFullWorkersAreExplained explains and queries a request while one worker is full, and
// while both are.
func TestFullWorkersAreExplained(t *testing.T) {
	h := startGated(t, 2, "trust explain")
	var all []asked
	for full := 1; full <= 2; full++ {
		all = append(all, h.startChat(t, "hi"))
		h.awaitRunning(t, int64(full))
		var e struct {
			Refused *struct{}
			Waits   *struct {
				Before int `json:"waiting_requests"`
			}
			Candidates []struct{}
			LeftOut    []struct {
				Why string
			} `json:"left_out"`
		}
		h.api(t, http.MethodPost, "/pools/default/explain?path=/v1/chat/completions", ask("x").body(), &e)
		if len(e.LeftOut) != full || e.LeftOut[0].Why != "full" || len(e.Candidates) != 2-full || (e.Waits != nil) != (full == 2) || e.Refused != nil {
			t.Errorf("%d full: %+v", full, e)
		}
		// the one that it would wait for
		if q := queried(t, h.mustChat(t, withHints("hello", `{"annotations":["query_instance_id"]}`)), false); q.NVExt.WorkerID["decode_worker_id"] == 0 {
			t.Errorf("%d full: told %v", full, q.NVExt.WorkerID)
		}
	}
	all = append(all, h.startChat(t, "hi"))
	h.wantWaiting(t, 1)
	var pool struct {
		Waiting   int `json:"waiting_requests"`
		Incidents []struct{ What string }
	}
	h.api(t, http.MethodGet, "/pools/default", nil, &pool)
	if pool.Waiting != 1 || !strings.Contains(fmt.Sprint(pool.Incidents), "all workers are full") {
		t.Errorf("the pool is said to be %+v", pool)
	}
	h.finish(t, all...)
}

// startComputing starts two engines that compute about one prompt of 2,500 words in a step, in 0.2 s. Answers
// are short.
func startComputing(t *testing.T) []*engine.Engine {
	t.Helper()
	return startFleet(t, 2, engine.Config{Speed: 1, AnswerTokens: 4})
}

// essay returns a streamed chat of unlike words.
func essay(words int) chat {
	var b strings.Builder
	for range words {
		fmt.Fprintf(&b, "w%04d ", rand.IntN(10000))
	}
	c := simChat(b.String()).streamed()
	c.MaxTokens = 2
	return c
}

// TestOverloadRefusesWhatWouldBeLate has more requests come at once than the engines can serve in time. Those
// that would be late are refused, and counted. How many of the others are in time depends on the machine.
func TestOverloadRefusesWhatWouldBeLate(t *testing.T) {
	takesSeconds(t)
	s := startCaddy(t, route(startComputing(t), "tenant {header.X-Org}", "class default {\nttft 1s\nlate refuse\n}"))
	for i := range 15 { // 10 promises are compared before any request is refused
		s.mustChat(t, essay(500), "X-Org", fmt.Sprint(i%4))
	}
	bodies := make([]string, 40) // eight seconds of work
	for i := range bodies {
		bodies[i] = string(essay(5000).body())
	}
	const promises = "caddy_kv_router_promises_total"
	before := s.scrape(t)
	var all []asked
	for i, body := range bodies {
		all = append(all, s.start(t, atChat, body, "X-Org", fmt.Sprint(i%4)))
	}
	refusals := 0
	for _, q := range all {
		a := q.wait(t)
		if a.ok() {
			continue
		}
		refusals++
		wantError(t, "late", a, http.StatusTooManyRequests, "ttft_unattainable", "the first token is predicted in", "class default", "try again later")
		if after, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || after < 1 {
			t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
		}
	}
	if t.Logf("%d of %d refused", refusals, len(all)); refusals == 0 {
		t.Error("nothing was refused")
	}
	var state struct {
		Classes []struct {
			Class   string `json:"class"`
			Refused int    `json:"refused_requests"`
		} `json:"classes"`
	}
	s.api(t, http.MethodGet, defaultPool+"/state", nil, &state)
	if len(state.Classes) != 1 || state.Classes[0].Class != "default" || state.Classes[0].Refused != refusals {
		t.Errorf("classes %v, want %d refused", state.Classes, refusals)
	}
	s.wantFigures(t, before, []figure{{promises, []string{`class="default"`, `outcome="refused"`}, float64(refusals)}})
}

// TestOneTenantDoesNotStarveOthers has 24 clients of a tenant send long prompts to two engines, beside short ones of
// others. It counts how many long prompts are answered while a short one waits: without a queue, with one, and with those
// of two routers.
func TestOneTenantDoesNotStarveOthers(t *testing.T) {
	takesSeconds(t)
	beside := func(hold string, n int, share string) int64 {
		engines := startComputing(t)
		answered := func() (sum int64) {
			for _, e := range engines {
				for _, r := range e.Journal() {
					if r.Outcome == engine.Finished && r.Header.Get("X-Org") == "flood" {
						sum++
					}
				}
			}
			return sum
		}
		site := route(engines, "tenant {header.X-Org}", "queue {\nhold "+hold+"\n}", share)
		routers := make([]*child, n)
		for i := range routers {
			routers[i] = newChild(t)
			routers[i].start(t, site)
		}
		for i := 0; n > 1 && i < n; i++ {
			routers[i].awaitRouters(t, n-1)
		}
		learned := func() bool { // what a prompt takes
			return !slices.ContainsFunc(routers, func(r *child) bool {
				timings := 0
				for _, w := range r.workers(t) {
					timings += w.Ranks[0].Accuracy.Timings
				}
				return timings < 20 // before, a router holds nothing
			})
		}
		asked := 0
		eventually(t, "the routers to learn", func() bool {
			routers[asked%n].mustChat(t, essay(500), "X-Org", fmt.Sprint(asked%2))
			asked++
			return asked >= 24 && learned()
		})
		ctx, stop := context.WithCancel(t.Context())
		var flood, others sync.WaitGroup
		for i := range 24 {
			flood.Go(func() {
				for ctx.Err() == nil {
					routers[i%n].chat(t.Context(), essay(2500), "X-Org", "flood")
				}
			})
		}
		eventually(t, "the flood", func() bool { return answered() >= 4 })
		const tenants, each = 5, 2
		var sum atomic.Int64
		for i := range tenants {
			others.Go(func() {
				for k := range each {
					before := answered()
					routers[(i+k)%n].chat(t.Context(), essay(10), "X-Org", fmt.Sprint("short", i))
					sum.Add(answered() - before)
				}
			})
		}
		others.Wait()
		stop()
		flood.Wait()
		return sum.Load() / tenants / each
	}
	off, one, two := beside("off", 1, ""), beside("auto", 1, ""), beside("auto", 2, "share "+startValkey(t).URL())
	t.Logf("a prompt waits for %d of the flood without a queue, %d with one, and %d with two", off, one, two)
	if 2*one > off || 2*two > off {
		t.Error("one tenant starves the others")
	}
}
