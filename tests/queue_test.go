package tests

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

const (
	waitingRequests = "caddy_kv_router_waiting_requests"
	queueRejected   = "caddy_kv_router_queue_rejected_total"
	queueWaits      = "caddy_kv_router_queue_wait_seconds_count"
)

// gate holds an engine's requests until the test admits them, and counts them.
type gate struct {
	name          string
	running, most atomic.Int64
	let           chan int // statuses to answer with; 0 hangs up
}

// hold puts a gate into an engine, for its POST requests.
func hold(e *canned.Engine) *gate {
	g := &gate{name: e.Name(), let: make(chan int)}
	e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			g.serve(w, r)
		}
	})
	return g
}

func (g *gate) serve(w http.ResponseWriter, r *http.Request) {
	n := g.running.Add(1)
	for most := g.most.Load(); n > most && !g.most.CompareAndSwap(most, n); {
		most = g.most.Load()
	}
	defer g.running.Add(-1)
	select {
	case status := <-g.let:
		g.answer(w, status)
	case <-r.Context().Done():
	}
}

func (g *gate) answer(w http.ResponseWriter, status int) {
	if status == 0 {
		canned.CloseConn(w, false)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"choices":[{"message":{"role":"assistant","content":%q}}]}`, g.name)
}

// pass admits one request.
func (g *gate) pass(t testing.TB, status int) {
	t.Helper()
	select {
	case g.let <- status:
	case <-time.After(patience):
		t.Fatalf("no request at %s to be let through", g.name)
	}
}

// opened admits all requests from now on.
func (g *gate) opened(t testing.TB) {
	ctx := t.Context()
	go func() {
		for {
			select {
			case g.let <- http.StatusOK:
			case <-ctx.Done():
				return
			}
		}
	}()
}

// asked is an active request.
type asked struct {
	answer chan answer
	leave  context.CancelFunc
}

// wait returns the answer.
func (q asked) wait(t testing.TB) answer {
	t.Helper()
	select {
	case a := <-q.answer:
		return a
	case <-time.After(patience):
		t.Fatal("no answer")
		return answer{}
	}
}

// start sends a request and does not wait for its answer.
func (s *server) start(t testing.TB, path, body string, header ...string) asked {
	ctx, cancel := context.WithCancel(t.Context())
	q := asked{make(chan answer, 1), cancel}
	go func() { q.answer <- s.post(ctx, path, []byte(body), header...) }()
	return q
}

// startChat starts a chat with this content.
func (s *server) startChat(t testing.TB, content string, header ...string) asked {
	return s.start(t, "/v1/chat/completions", string(ask(content).body()), header...)
}

// wantWaiting waits until n requests wait.
func (s *server) wantWaiting(t testing.TB, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d requests wait", n), func() bool {
		v, there := s.scrape(t).sum(waitingRequests)
		return there && v == float64(n)
	})
}

// slotsFree waits until no lease, no queued request and no taken slot is left.
func (s *server) slotsFree(t testing.TB) {
	t.Helper()
	s.booksAtZero(t)
	s.wantWaiting(t, 0)
	eventually(t, "all slots are free", func() bool {
		taken := 0
		for _, w := range s.workers(t) {
			taken += w.Load.Running
		}
		return taken == 0
	})
}

func maxRunning(n int) string { return fmt.Sprintf("worker * {\nmax_running %d\n}", n) }

// gated is a router before engines that hold their inferences.
type gated struct {
	*server
	engines []*canned.Engine
	gates   []*gate
}

// startGated starts n engines with one slot each, unless the block has another limit.
func startGated(t testing.TB, n int, block ...string) *gated {
	t.Helper()
	h := &gated{engines: startEngines(t, n, canned.Pace{})}
	if !strings.Contains(strings.Join(block, "\n"), "max_running") {
		block = append(block, maxRunning(1))
	}
	h.server = startCaddy(t, route(h.engines, block...))
	for _, e := range h.engines {
		h.gates = append(h.gates, hold(e))
	}
	return h
}

// awaitRunning waits until the engines have n requests in all.
func (h *gated) awaitRunning(t testing.TB, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("the engines have %d requests", n), func() bool {
		sum := int64(0)
		for _, g := range h.gates {
			sum += g.running.Load()
		}
		return sum == n
	})
}

// startChats starts n chats.
func (s *server) startChats(t testing.TB, n int, header ...string) (all []asked) {
	for i := range n {
		all = append(all, s.startChat(t, fmt.Sprint("request ", i), header...))
	}
	return all
}

// finish admits all requests, and waits until they are served and all slots are free.
func (h *gated) finish(t testing.TB, all ...asked) {
	t.Helper()
	for _, g := range h.gates {
		g.opened(t)
	}
	h.wantServed(t, "", all...)
}

// wantServed waits until the requests are served, by an engine if it is named, and all slots
// are free.
func (s *server) wantServed(t testing.TB, by string, all ...asked) {
	t.Helper()
	for i, q := range all {
		if a := q.wait(t); !a.ok() || by != "" && a.engine() != by {
			t.Errorf("request %d: status %d, error %v, by %q, body %.200q", i, a.status, a.err, a.engine(), a.body)
		}
	}
	s.slotsFree(t)
}

// order returns what follows "request " in the requests that an engine received.
func order(e *canned.Engine) string {
	var all []string
	for _, r := range e.Journal() {
		if _, rest, ok := strings.Cut(string(r.Body), "request "); ok {
			all = append(all, rest[:strings.IndexAny(rest, " \"")])
		}
	}
	return strings.Join(all, " ")
}

// TestPrioritiesOrderTheQueue has requests wait whose priorities come from nvext and from
// headers, and one whose client is not trusted with any. The admin API says why one waits, and why it has waited.
func TestPrioritiesOrderTheQueue(t *testing.T) {
	h := startGated(t, 1, trust("priorities"), "queue {\nmax_waiting 7\n}")
	all := h.startChats(t, 1)
	runs(t, h.gates[0], 1)
	for i, v := range []struct {
		nvext  string
		header []string
	}{
		{`{}`, append([]string{"X-Request-Id", "waits"}, trusted...)},
		{`{"agent_hints":{"priority":60}}`, trusted},
		{`{"agent_hints":{"latency_sensitivity":30}}`, trusted},
		{`{"agent_hints":{"priority":-5}}`, trusted}, // there is no time below zero
		{`{"agent_hints":{"strict_priority":1}}`, trusted},
		{`{"agent_hints":{"strict_priority":1}}`, append([]string{"X-Dynamo-Request-Strict-Priority", "2"}, trusted...)},
		{`{"agent_hints":{"strict_priority":9,"priority":99}}`, nil},
	} {
		all = append(all, h.start(t, "/v1/chat/completions", string(withHints(fmt.Sprintf("request %d", i+1), v.nvext).body()), v.header...))
		h.wantWaiting(t, i+1)
	}
	const full = "all workers are full"
	explain := func() (list []adminWait) {
		h.api(t, http.MethodGet, defaultPool+"/choices?request_id=waits", nil, &list)
		return list
	}
	if got := explain(); len(got) != 1 || got[0].Waits.Before != 7 || got[0].Waits.Why[0] != full || got[0].Queued <= 0 {
		t.Errorf("a request that waits is explained as %+v", got)
	}
	// The queue is full: one with a priority takes the place of the last.
	late := h.start(t, "/v1/chat/completions", string(withHints("request 8", `{"agent_hints":{"priority":120}}`).body()), trusted...)
	if a := all[7].wait(t); a.status != http.StatusTooManyRequests {
		t.Errorf("the last one got %d", a.status)
	}
	h.finish(t, append(all[:7], late)...)
	if got, want := order(h.engines[0]), "0 6 5 8 2 3 1 4"; got != want {
		t.Errorf("served in the order %s, want %s", got, want)
	}
	if got := explain(); len(got) != 1 || got[0].Why != full || got[0].Queued <= 0 || !strings.Contains(got[0].Sentence, full) {
		t.Errorf("a request that has waited is explained as %+v", got)
	}
}

// adminWait is how the admin API explains a wait.
type adminWait struct {
	Queued   float64 `json:"queued_ms"`
	Why      string  `json:"queued_because"`
	Sentence string  `json:"sentence"`
	Waits    struct {
		Before int      `json:"waiting_requests"`
		Why    []string `json:"why"`
	} `json:"waits"`
}

// TestRetryKeepsItsPlace has one engine refuse a request while later requests wait. The
// refused request is the first to get the other engine.
func TestRetryKeepsItsPlace(t *testing.T) {
	h := startGated(t, 2)
	all := h.startChats(t, 1)
	h.awaitRunning(t, 1)
	one, two := 0, 1 // the first one's engine, and the other
	if h.gates[1].running.Load() == 1 {
		one, two = 1, 0
	}
	all = append(all, h.startChat(t, "request 1"))
	runs(t, h.gates[two], 1)
	all = append(all, h.startChat(t, "request 2"))
	h.wantWaiting(t, 1)
	h.gates[one].pass(t, http.StatusTooManyRequests)
	// A refusal marks the worker down for half a second, then the third gets
	// that slot.
	eventually(t, "the third is served", func() bool { return h.engines[one].Requests() == 2 })
	all = append(all, h.startChat(t, "request 3"))
	h.wantWaiting(t, 2)
	h.gates[two].pass(t, http.StatusOK)
	eventually(t, "the next one is served", func() bool { return h.engines[two].Requests() == 2 })
	equal(t, order(h.engines[two]), "1 0", "the order at the engine, where the first comes after the second")
	h.finish(t, all...)
}

// TestTurnedAwayRequestsAreToldSo fills the queue and exceeds its max_wait, with clients
// of two APIs. Metrics and access log say who waited and who was rejected.
func TestTurnedAwayRequestsAreToldSo(t *testing.T) {
	for _, v := range []struct{ path, full, late string }{
		{"/v1/chat/completions", "rate_limit_error", "server_error"},
		{"/v1/messages", "rate_limit_error", "overloaded_error"},
	} {
		t.Run(v.path, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			file := filepath.Join(t.TempDir(), "access.log")
			site := func(wait string) string {
				return fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file) +
					route(engines, maxRunning(1), "queue {\nmax_waiting 1\nmax_wait "+wait+"\n}")
			}
			s := startCaddy(t, site("100ms"))
			g := hold(engines[0])
			before := s.scrape(t)
			body := string(ask("x").body())
			served := s.start(t, v.path, body)
			runs(t, g, 1)
			wantTurnedAway(t, s.post(t.Context(), v.path, []byte(body)), http.StatusServiceUnavailable, "queue_timeout", v.late)
			s.adopt(t, site("1h"))
			waits := s.start(t, v.path, body)
			s.wantWaiting(t, 1)
			wantTurnedAway(t, s.post(t.Context(), v.path, []byte(body)), http.StatusTooManyRequests, "queue_full", v.full)
			g.pass(t, http.StatusOK)
			g.pass(t, http.StatusOK)
			for _, q := range []asked{served, waits} {
				if a := q.wait(t); a.status != http.StatusOK {
					t.Errorf("one that is served: status %d", a.status)
				}
			}
			s.wantFigures(t, before, []figure{
				{queueRejected, []string{`reason="full"`}, 1},
				{queueRejected, []string{`reason="timeout"`}, 1},
				{requestsTotal, []string{`outcome="queue_rejected"`}, 2},
				{requestsTotal, []string{`outcome="ok"`}, 3}, // with that of adopt
				{queueWaits, nil, 2},
			})
			lines := make(map[string]int) // by outcome, and whether it waited
			eventually(t, "four lines of the access log", func() bool {
				data, err := os.ReadFile(file)
				clear(lines)
				for line := range strings.Lines(string(data)) {
					if said := gjson.Get(line, "kv_router"); said.Exists() {
						lines[fmt.Sprintf("%s %s %v", said.Get("outcome").Str, said.Get("refused").Str, said.Get("queue_wait").Num > 0)]++
					}
				}
				return err == nil && len(lines) == 4 && lines["queue_rejected queue_full false"] == 1 && lines["queue_rejected queue_timeout true"] == 1
			})
			for _, line := range []string{markedDown, "no worker"} {
				equal(t, s.logged(t, line), 0, "log lines that say %q: no worker has failed", line)
			}
			s.slotsFree(t)
		})
	}
}

func wantTurnedAway(t *testing.T, a answer, status int, code, kind string) {
	t.Helper()
	if got, message := errorOf(a); a.status != status || got != code || gjson.GetBytes(a.body, "error.type").Str != kind || message == "" {
		t.Errorf("status %d, body %s; want %d with %s and %s", a.status, a.body, status, code, kind)
	}
	if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 || n > 60 {
		t.Errorf("Retry-After %q, want 1 to 60 seconds", a.header.Get("Retry-After"))
	}
}

// TestHeldRefusals has one engine that refuses, and another that is full. A request waits
// in vain for the other, and gets the refusal. With a Retry-After it waits no longer than
// that says.
func TestHeldRefusals(t *testing.T) {
	for _, v := range []struct{ wait, after string }{{"300ms", ""}, {"1h", "1"}} {
		h := startGated(t, 2, "policy round_robin", "queue {\nmax_wait "+v.wait+"\n}")
		f := canned.Fault{Kind: canned.Status, Status: 503, Body: `{"error":"slow down"}`}
		if v.after != "" {
			f.Header = http.Header{"Retry-After": {v.after}}
		}
		h.engines[1].SetHandler(nil)
		h.engines[1].SetFault(f)
		served := h.startChat(t, "one")
		runs(t, h.gates[0], 1)
		wantAnswer(t, h.startChat(t, "two").wait(t), f)
		h.gates[0].pass(t, http.StatusOK)
		h.wantServed(t, "e1", served)
	}
}

// TestNobodyIsTurnedAwayWhileAWorkerHasRoom has two engines. One is marked down and gets
// one trial request at a time. The other is full. Requests that the queue would reject go
// to the first, whether they have waited or not.
func TestNobodyIsTurnedAwayWhileAWorkerHasRoom(t *testing.T) {
	for name, queue := range map[string]string{"Late": "max_wait 300ms", "Overflow": "max_waiting 1\nmax_wait 1h"} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "policy round_robin", maxRunning(4), "queue {\n"+queue+"\n}"))
			engines[1].FailNext(1, refusal)
			for i := range 2 { // one of them meets the refusal
				s.mustChat(t, ask(fmt.Sprint("before ", i)))
			}
			h := &gated{s, engines, []*gate{hold(engines[0]), hold(engines[1])}}
			time.Sleep(600 * time.Millisecond) // the mark is over, its window is not
			var all []asked
			for i := range 8 {
				all = append(all, s.startChat(t, fmt.Sprint("request ", i)))
				if i < 5 {
					h.awaitRunning(t, int64(i)+1)
				}
			}
			eventually(t, "nobody is left with nothing", func() bool {
				return h.gates[0].running.Load()+h.gates[1].running.Load() >= 7
			})
			h.finish(t, all...)
		})
	}
}

// TestSlowUploadsHoldNoSlot has clients that send only the beginning of a body that is too
// long to be read.
func TestSlowUploadsHoldNoSlot(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(2), "max_body 1KiB", "queue {\nmax_wait 2s\n}"))
	for range 2 {
		s.announce(t, 2000, []byte("x"))
	}
	eventually(t, "both are at the engine", func() bool { return s.scrape(t).value(workerRequests) == 2 })
	s.mustChat(t, ask("hi"))
}
