package tests

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// adopt makes the first request of a new configuration, by which its pool adopts the
// settings.
func (s *server) adopt(t testing.TB, site string) {
	t.Helper()
	if err := s.reload(site); err != nil {
		t.Fatal(err)
	}
	if status, _, err := s.get(t.Context(), s.url+"/adopted"); err != nil || status != http.StatusOK {
		t.Fatalf("status %d, error %v", status, err)
	}
}

// holdInferences is hold for inferences only.
func holdInferences(e *canned.Engine) *gate {
	g := hold(e)
	e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			g.serve(w, r)
		}
	})
	return g
}

func runs(t testing.TB, g *gate, n int64) {
	t.Helper()
	eventually(t, 5*time.Second, fmt.Sprintf("%s has %d requests", g.name, n), func() bool { return g.running.Load() == n })
}

// TestLimitsChangeWhileRequestsWait raises the limit by a reload, then lowers it.
func TestLimitsChangeWhileRequestsWait(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	g := holdInferences(engines[0])
	var all []asked
	for range 6 {
		all = append(all, s.startChat(t, "hi"))
	}
	s.wantWaiting(t, 5)
	s.adopt(t, route(engines, maxRunning(4)))
	s.wantWaiting(t, 2)
	runs(t, g, 4)
	s.adopt(t, route(engines, maxRunning(2)))
	if w := s.slots(t)[0]; w.Load.Max == nil || *w.Load.Max != 2 || w.Load.Running != 4 {
		t.Errorf("the admin API says %+v, want 4 running of 2", w)
	}
	all = append(all, s.startChat(t, "after the reload"))
	s.wantWaiting(t, 3)
	for range 2 { // it may keep what it has, and gets no more
		g.pass(t, http.StatusOK)
	}
	runs(t, g, 2)
	s.wantWaiting(t, 3)
	g.pass(t, http.StatusOK)
	s.wantWaiting(t, 2)
	runs(t, g, 2)
	s.adopt(t, route(engines)) // no limit
	s.wantWaiting(t, 0)
	runs(t, g, 4)
	g.opened(t)
	for i, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	s.slotsFree(t)
}

// TestRemovedWorkerStillServesThoseWhoWait removes a worker from the configuration while
// requests wait for it. They get it within its old limit.
func TestRemovedWorkerStillServesThoseWhoWait(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines[:1], fmt.Sprintf("worker %s {\nid 7\nmax_running 1\n}", engines[0].Addr())))
	g := holdInferences(engines[0])
	var all []asked
	for range 4 {
		all = append(all, s.startChat(t, "hi"))
	}
	s.wantWaiting(t, 3)
	s.adopt(t, route(engines[1:]))
	for i := range 10 {
		if a := s.mustChat(t, ask(fmt.Sprint("new ", i))); a.engine() != "e2" {
			t.Errorf("answered by %s", a.engine())
		}
	}
	s.wantWaiting(t, 3)
	g.opened(t)
	for i, q := range all {
		if a := q.wait(t); !a.ok() || a.engine() != "e1" {
			t.Errorf("request %d: status %d, error %v, by %q", i, a.status, a.err, a.engine())
		}
	}
	if n := g.most.Load(); n != 1 {
		t.Errorf("it had up to %d requests at a time, want 1", n)
	}
	s.slotsFree(t)
}

// TestEngineDiesWhileRequestsWait kills the engine that requests wait for. They go to the
// other engine, or get an answer soon if there is none.
func TestEngineDiesWhileRequestsWait(t *testing.T) {
	for _, n := range []int{1, 2} {
		t.Run(fmt.Sprintf("Engines=%d", n), func(t *testing.T) {
			engines := startEngines(t, n, canned.Pace{})
			s := startCaddy(t, route(engines, maxRunning(2)))
			var gates []*gate
			for _, e := range engines {
				gates = append(gates, hold(e))
			}
			var all []asked
			for range 2*n + 8 {
				all = append(all, s.startChat(t, "hi"))
			}
			s.wantWaiting(t, 8)
			engines[0].Kill()
			if n > 1 {
				gates[1].opened(t)
			}
			codes := make(map[string]int)
			for i, q := range all {
				switch a := q.wait(t); {
				case n > 1 && (!a.ok() || a.engine() != "e2"):
					t.Errorf("request %d: status %d, error %v, by %q", i, a.status, a.err, a.engine())
				case n == 1 && strings.Contains(string(a.body), "no_worker"):
					codes["no_worker"]++
				case n == 1 && strings.Contains(string(a.body), "worker_failed"):
					codes["worker_failed"]++
				case n == 1:
					t.Errorf("request %d: status %d, body %s", i, a.status, a.body)
				}
			}
			t.Logf("the answers: %v", codes)
			s.slotsFree(t)
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
	if a := served.wait(t); !a.ok() {
		t.Errorf("the one that was served: status %d, error %v", a.status, a.err)
	}
	s.slotsFree(t)
}

// TestDrainedWorkerIsNotWaitedFor drains one of two full workers.
func TestDrainedWorkerIsNotWaitedFor(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	var all []asked
	for range 5 {
		all = append(all, s.startChat(t, "hi"))
	}
	s.wantWaiting(t, 3)
	s.api(t, http.MethodPost, "/pools/default/workers/"+engines[0].Addr()+"/drain", nil, new(adminWorker))
	gates[0].pass(t, http.StatusOK)
	gates[1].pass(t, http.StatusOK)
	s.wantWaiting(t, 2)
	runs(t, gates[1], 1)
	if n := engines[0].Requests(); n != 1 {
		t.Errorf("the drained engine was sent %d requests, want the 1 from before", n)
	}
	s.api(t, http.MethodPost, "/pools/default/workers/"+engines[0].Addr()+"/undrain", nil, new(adminWorker))
	runs(t, gates[0], 1) // though no slot has become free
	gates[0].opened(t)
	gates[1].opened(t)
	for i, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	s.slotsFree(t)
}

// TestMarkedDownWorkerIsNoResortForFullOnes has a worker with a free slot that has just
// failed, and a full healthy one. A request waits for either. It does not go to the first
// before its mark ends.
func TestMarkedDownWorkerIsNoResortForFullOnes(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	var cut, busy asked
	for {
		cut = s.startChat(t, "the first")
		eventually(t, 5*time.Second, "it is served", func() bool { return gates[0].running.Load()+gates[1].running.Load() == 1 })
		if gates[0].running.Load() == 1 {
			break
		}
		gates[1].pass(t, http.StatusOK)
		cut.wait(t)
		s.slotsFree(t)
	}
	busy = s.startChat(t, "the second")
	runs(t, gates[1], 1)
	before := engines[0].Requests()
	failing := time.Now()
	gates[0].pass(t, 0)
	s.wantWaiting(t, 1) // what was cut off, for the other one
	cut.leave()
	s.wantWaiting(t, 0)
	last := s.startChat(t, "the last")
	runs(t, gates[0], 1)
	if d := engines[0].Journal()[before].At.Sub(failing); d < 500*time.Millisecond {
		t.Errorf("the failed engine got a request after %v, want at least half a second", d)
	}
	gates[0].opened(t)
	gates[1].opened(t)
	for i, q := range []asked{busy, last} {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	s.slotsFree(t)
}

// startFullHome binds the session "wanderer", and fills its worker, which can take one request.
func startFullHome(t *testing.T, options ...string) (f fullHome) {
	t.Helper()
	engines := startEngines(t, 2, canned.Pace{})
	f.server = startCaddy(t, route(engines, append(options, maxRunning(1), "response_headers X-KV-")...))
	f.session = []string{"X-Session-Id", "wanderer"}
	f.home = f.mustChat(t, ask(wandering+"turn 1"), f.session...).engine()
	f.engine = engines[slices.IndexFunc(engines, func(e *canned.Engine) bool { return e.Name() == f.home })]
	f.gate = hold(f.engine)
	f.busy = f.startChat(t, wandering+"turn 1 of another", f.session...) // same home
	runs(t, f.gate, 1)
	return f
}

var wandering = strings.Repeat("a long history ", 400)

type fullHome struct {
	*server
	engine  *canned.Engine
	home    string // its name
	session []string
	gate    *gate
	busy    asked
}

// free ends the request that fills the session's worker.
func (f *fullHome) free(t *testing.T) {
	t.Helper()
	f.gate.pass(t, http.StatusOK)
	if a := f.busy.wait(t); !a.ok() {
		t.Errorf("status %d, error %v", a.status, a.err)
	}
	f.gate.opened(t)
}

// TestSessionIsAwayForOneTurn fills a session's worker at one of its turns. The session stays
// bound.
func TestSessionIsAwayForOneTurn(t *testing.T) {
	f := startFullHome(t)
	for turn := range 3 {
		if a := f.mustChat(t, ask(fmt.Sprint(wandering, "turn ", turn+2)), f.session...); a.engine() == f.home {
			t.Errorf("turn %d was answered by the full %s", turn+2, f.home)
		}
	}
	var bound adminSession
	f.api(t, http.MethodGet, "/pools/default/sessions/wanderer", nil, &bound)
	if bound.Dial != f.engine.Addr() {
		t.Errorf("the session is bound to %s, want %s still", bound.Dial, f.engine.Addr())
	}
	f.free(t)
	f.slotsFree(t)
	if a := f.mustChat(t, ask(wandering+"turn 5"), f.session...); a.engine() != f.home || a.header.Get("X-KV-Reason") != "session" {
		t.Errorf("the next turn was answered by %s, reason %q; want %s", a.engine(), a.header.Get("X-KV-Reason"), f.home)
	}
}

// TestHardSessionWaitsForItsWorker fills a session's worker with affinity mode hard. A turn
// waits for that worker, and not for ever.
func TestHardSessionWaitsForItsWorker(t *testing.T) {
	f := startFullHome(t, affinity("hard"))
	turn := f.startChat(t, wandering+"turn 2", f.session...)
	f.wantWaiting(t, 1)
	if a := f.mustChat(t, ask("no session")); a.engine() == f.home {
		t.Errorf("another request was answered by the full %s", f.home)
	}
	f.free(t)
	if a := turn.wait(t); !a.ok() || a.engine() != f.home {
		t.Errorf("status %d, error %v, answered by %s, want %s", a.status, a.err, a.engine(), f.home)
	}
	f.slotsFree(t)
}

// TestHardSessionWaitsNoLongerThanTheQueue lets a turn wait too long for its session's worker.
func TestHardSessionWaitsNoLongerThanTheQueue(t *testing.T) {
	f := startFullHome(t, affinity("hard"), "queue {\nmax_wait 200ms\n}")
	a := f.chat(t.Context(), ask(wandering+"turn 2"), f.session...)
	if a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" || !strings.Contains(string(a.body), "queue_timeout") {
		t.Errorf("status %d, Retry-After %q: %s", a.status, a.header.Get("Retry-After"), a.body)
	}
	f.free(t)
	f.slotsFree(t)
}

// TestHardSessionsFirstRequestsWait has more concurrent first requests of a session than one
// worker takes, with affinity mode hard. All go to one worker.
func TestHardSessionsFirstRequestsWait(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(2), affinity("hard")))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	var all []asked
	for range 4 {
		all = append(all, s.startChat(t, "first", "X-Session-Id", "burst"))
	}
	s.wantWaiting(t, 2)
	for _, g := range gates {
		g.opened(t)
	}
	home := ""
	for _, q := range all {
		a := q.wait(t)
		if home == "" {
			home = a.engine()
		}
		if !a.ok() || a.engine() != home {
			t.Errorf("status %d, answered by %s, want %s", a.status, a.engine(), home)
		}
	}
}

// TestClientGoneLeavesNoSlotTaken has clients leave at each stage. Others get their slots.
func TestClientGoneLeavesNoSlotTaken(t *testing.T) {
	for _, v := range []struct {
		name string
		pace canned.Pace
		fail canned.Fault
	}{
		{"BeforeTheHeader", canned.Pace{}, canned.Fault{Kind: canned.HangBeforeHeader}},
		{"BeforeTheFirstToken", canned.Pace{FirstToken: time.Minute}, canned.Fault{}},
		{"InMidStream", canned.Pace{Words: 10_000, PerWord: 10 * time.Millisecond}, canned.Fault{}},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 1, v.pace)
			engines[0].SetFault(v.fail)
			s := startCaddy(t, route(engines, maxRunning(1)))
			before := s.scrape(t)
			body := string(ask("hi").streamed().body())
			served := s.start(t, "/v1/chat/completions", body)
			eventually(t, 5*time.Second, "it is served", func() bool { return engines[0].Active() == 1 })
			waits := s.start(t, "/v1/chat/completions", body)
			s.wantWaiting(t, 1)
			gone := s.start(t, "/v1/chat/completions", body)
			s.wantWaiting(t, 2)
			gone.leave() // from the queue
			s.wantWaiting(t, 1)
			engines[0].SetFault(canned.Fault{})
			engines[0].SetPace(canned.Pace{})
			served.leave()
			if a := waits.wait(t); !a.ok() {
				t.Errorf("status %d, error %v, body %.200s", a.status, a.err, a.body)
			}
			s.wantFigures(t, before, []figure{
				{requestsTotal, []string{`outcome="client_gone"`}, 2},
				{requestsTotal, []string{`outcome="ok"`}, 1},
				{queueRejected, nil, 0},
			})
			s.slotsFree(t)
		})
	}
	t.Run("BetweenTwoAttempts", func(t *testing.T) {
		engines := startEngines(t, 2, canned.Pace{})
		s := startCaddy(t, route(engines, maxRunning(1)))
		gates := []*gate{hold(engines[0]), hold(engines[1])}
		all := []asked{s.startChat(t, "one"), s.startChat(t, "two")}
		runs(t, gates[0], 1)
		runs(t, gates[1], 1)
		gates[0].pass(t, http.StatusServiceUnavailable) // held back
		s.wantWaiting(t, 1)
		all[0].leave()
		all[1].leave()
		s.slotsFree(t)
		gates[0].opened(t)
		gates[1].opened(t)
		s.mustChat(t, ask("and now?"))
	})
}

// TestFullWorkersAreExplained explains a request while one worker is full, and while both
// are.
func TestFullWorkersAreExplained(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	var all []asked
	for full := 1; full <= 2; full++ {
		all = append(all, s.startChat(t, "hi"))
		eventually(t, 5*time.Second, "it is served", func() bool { return gates[0].running.Load()+gates[1].running.Load() == int64(full) })
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
		s.api(t, http.MethodPost, "/pools/default/explain?path=/v1/chat/completions", ask("x").body(), &e)
		if len(e.LeftOut) != full || e.LeftOut[0].Why != "full" || len(e.Candidates) != 2-full || (e.Waits != nil) != (full == 2) || e.Refused != nil {
			t.Errorf("%d full: %+v", full, e)
		}
	}
	all = append(all, s.startChat(t, "hi"))
	s.wantWaiting(t, 1)
	var pool struct {
		Waiting   int `json:"waiting_requests"`
		Incidents []struct{ What string }
	}
	s.api(t, http.MethodGet, "/pools/default", nil, &pool)
	if pool.Waiting != 1 || len(pool.Incidents) != 1 || !strings.Contains(pool.Incidents[0].What, "full") {
		t.Errorf("the pool is said to be %+v", pool)
	}
	gates[0].opened(t)
	gates[1].opened(t)
	for _, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
	}
	s.slotsFree(t)
}
