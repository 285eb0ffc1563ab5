package tests

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
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

// startFullHome binds the session "wanderer", and fills its worker, which can take one request.
func startFullHome(t *testing.T, options ...string) (f fullHome) {
	t.Helper()
	engines := startEngines(t, 2, canned.Pace{})
	f.engines = engines
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
	engines []*canned.Engine
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

// TestHardSessionWaitsForItsWorker fills a session's worker with affinity mode hard. A turn
// waits for that worker, and no longer than the queue allows.
func TestHardSessionWaitsForItsWorker(t *testing.T) {
	f := startFullHome(t, affinity("hard"), "queue {\nmax_wait 100ms\n}")
	late := f.startChat(t, wandering+"turn 2", f.session...)
	wantTurnedAway(t, late.wait(t), http.StatusServiceUnavailable, "queue_timeout", "server_error")
	f.adopt(t, route(f.engines, affinity("hard"), maxRunning(1)))
	turn := f.startChat(t, wandering+"turn 2", f.session...)
	f.wantWaiting(t, 1)
	if a := f.mustChat(t, ask("no session")); a.engine() == f.home {
		t.Errorf("another request was answered by the full %s", f.home)
	}
	f.free(t)
	f.wantServed(t, f.home, turn)
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
		if q := queried(t, h.mustChat(t, wishing("hello", `{"annotations":["query_instance_id"]}`)), false); q.NVExt.WorkerID["decode_worker_id"] == 0 {
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

// TestMaxRunningAutoIsWhatEnginesReport has one engine of each kind, and one whose
// operator sets the limit.
func TestMaxRunningAutoIsWhatEnginesReport(t *testing.T) {
	const warning = "max_running is auto, and the engine reports no limit"
	flavours := []engine.Flavour{engine.SGLang, engine.OldSGLang, engine.LlamaCpp, engine.VLLM, engine.TRTLLM, engine.SGLang}
	var engines []*engine.Engine
	for i, f := range flavours {
		cfg := engine.Config{Flavour: f, Blocks: 300, MaxModelLen: 4096, MaxRunning: 4}
		if i == 0 {
			cfg.Ranks = 2
		}
		engines = append(engines, startSimulated(t, cfg))
	}
	s := startCaddy(t, simulated(engines, "pool default", "worker * {\nmax_running auto\n}", "worker "+engines[5].Addr()+" {\nmax_running 3\n}"))
	for i, want := range []struct {
		limit int
		from  string
		flag  string
	}{{8, "found", ""}, {4, "found", ""}, {4, "found", ""}, {0, "unknown", "--max-num-seqs"}, {0, "unknown", "--max_batch_size"}, {3, "configured", ""}} {
		dial := engines[i].Addr()
		eventually(t, string(flavours[i])+" to be found out", func() bool { return s.worker(t, dial).Engine.Type != "" })
		w := s.worker(t, dial)
		limit := 0
		if w.Load.Max != nil {
			limit = *w.Load.Max
		}
		if limit != want.limit || w.Load.From != want.from {
			t.Errorf("%s: limit %d from %q, want %d from %q", flavours[i], limit, w.Load.From, want.limit, want.from)
		}
		warned := len(w.Engine.Warnings) == 1 && w.Engine.Warnings[0].What == warning && strings.Contains(w.Engine.Warnings[0].Advice, want.flag)
		if warned != (want.flag != "") || len(w.Engine.Warnings) > 1 {
			t.Errorf("%s: warnings %+v", flavours[i], w.Engine.Warnings)
		}
		if n := s.scrape(t).value(engineWarnings, `worker="`+dial+`"`); n != float64(len(w.Engine.Warnings)) {
			t.Errorf("%s: %s is %v", flavours[i], engineWarnings, n)
		}
	}
	eventually(t, "two lines in the log", func() bool { return len(s.conditions(t, warning)) >= 2 })
	for _, l := range s.conditions(t, warning) {
		if l.Level != "warn" || l.Upstream != engines[3].Addr() && l.Upstream != engines[4].Addr() || l.Effect == "" || l.Advice == "" {
			t.Errorf("the log says %+v", l)
		}
	}
	if n := len(s.conditions(t, warning)); n != 2 {
		t.Errorf("%d warnings, want 2", n)
	}
}
