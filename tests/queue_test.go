package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
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

// hold puts a gate into an engine.
func hold(e *canned.Engine) *gate {
	g := &gate{name: e.Name(), let: make(chan int)}
	e.SetHandler(g.serve)
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
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			conn.Close()
		}
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
	case <-time.After(10 * time.Second):
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
	case <-time.After(20 * time.Second):
		t.Fatal("no answer in 20 s")
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
	eventually(t, 5*time.Second, fmt.Sprintf("%d requests wait", n), func() bool {
		v, there := s.scrape(t).sum(waitingRequests)
		return there && v == float64(n)
	})
}

// slotsFree waits until no lease, no queued request and no taken slot is left.
func (s *server) slotsFree(t testing.TB) {
	t.Helper()
	s.booksAtZero(t)
	s.wantWaiting(t, 0)
	eventually(t, 5*time.Second, "all slots are free", func() bool {
		taken := 0
		for _, w := range s.slots(t) {
			taken += w.Load.Running
		}
		return taken == 0
	})
}

type workerSlots struct {
	Dial string `json:"dial"`
	Load struct {
		Running int  `json:"running_requests"`
		Max     *int `json:"max_running_requests"`
	} `json:"load"`
}

func (s *server) slots(t testing.TB) (workers []workerSlots) {
	t.Helper()
	s.api(t, http.MethodGet, "/pools/default/workers", nil, &workers)
	return workers
}

func maxRunning(n int) string { return fmt.Sprintf("worker * {\nmax_running %d\n}", n) }

// TestWorkersAreNeverSentMoreThanTheyMayHave sends requests of 64 clients to two engines
// with four slots each. Some requests are refused or broken, and retried.
func TestWorkersAreNeverSentMoreThanTheyMayHave(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(4)))
	var most [2]atomic.Int64
	for i, e := range engines {
		var running, nth atomic.Int64
		e.SetHandler(func(w http.ResponseWriter, _ *http.Request) {
			n := running.Add(1)
			for m := most[i].Load(); n > m && !most[i].CompareAndSwap(m, n); {
				m = most[i].Load()
			}
			time.Sleep(3 * time.Millisecond)
			running.Add(-1) // before the end of the answer can be seen
			status := http.StatusOK
			switch k := nth.Add(1); {
			case k%11 == 0:
				status = 0
			case k%7 == 0:
				status = http.StatusTooManyRequests
			}
			(&gate{name: "x"}).answer(w, status)
		})
	}
	before := s.scrape(t)
	var clients sync.WaitGroup
	var served, refused, other atomic.Int64
	for i := range 64 {
		clients.Go(func() {
			for n := range 12 {
				c := ask(fmt.Sprintf("client %d, request %d", i, n))
				c.Stream = n%3 == 0
				switch a := s.chat(t.Context(), c); {
				case a.status == http.StatusOK:
					served.Add(1)
				case a.engine() != "" && a.status == http.StatusTooManyRequests || strings.Contains(string(a.body), "worker_failed"):
					refused.Add(1) // by both
				default:
					other.Add(1)
					t.Errorf("status %d, error %v, body %.200q", a.status, a.err, a.body)
				}
			}
		})
	}
	clients.Wait()
	m := s.scrape(t)
	t.Logf("%d served, %d refused by both engines, %v retries, %v waited", served.Load(), refused.Load(),
		m.value(retriesTotal)-before.value(retriesTotal), m.value(queueWaits)-before.value(queueWaits))
	for i := range most {
		if n := most[i].Load(); n != 4 {
			t.Errorf("engine %d had up to %d requests at a time, want 4", i+1, n)
		}
	}
	if m.value(queueWaits) == before.value(queueWaits) {
		t.Error("nobody waited")
	}
	s.slotsFree(t)
	if n := len(s.conditions(t, "all workers are full, and requests wait")); n != 1 {
		t.Errorf("%d log lines say that requests wait, want 1", n)
	}
}

// TestRequestsAreServedInTheirOrder sends requests one after the other while the only slot
// is taken.
func TestRequestsAreServedInTheirOrder(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	g := hold(engines[0])
	const n = 12
	var all []asked
	for i := range n {
		all = append(all, s.startChat(t, fmt.Sprintf("request %02d", i)))
		if i == 0 {
			eventually(t, 5*time.Second, "the first is served", func() bool { return g.running.Load() == 1 })
		} else {
			s.wantWaiting(t, i)
		}
	}
	all[5].leave()
	s.wantWaiting(t, n-2)
	for range n - 1 {
		g.pass(t, http.StatusOK)
	}
	for i, q := range all {
		if a := q.wait(t); i != 5 && !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	var order []string
	for _, r := range engines[0].Journal() {
		_, rest, _ := bytes.Cut(r.Body, []byte("request "))
		order = append(order, string(rest[:2]))
	}
	if got, want := strings.Join(order, " "), "00 01 02 03 04 06 07 08 09 10 11"; got != want {
		t.Errorf("served in the order %s, want %s", got, want)
	}
	s.slotsFree(t)
}

// TestRetryKeepsItsPlace has one engine refuse a request while later requests wait. The
// refused request is the first to get the other engine.
func TestRetryKeepsItsPlace(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	first := s.startChat(t, "the first")
	eventually(t, 5*time.Second, "it is served", func() bool { return gates[0].running.Load()+gates[1].running.Load() == 1 })
	one, two := 0, 1 // the first one's engine, and the other
	if gates[1].running.Load() == 1 {
		one, two = 1, 0
	}
	second := s.startChat(t, "the second")
	eventually(t, 5*time.Second, "both engines are full", func() bool { return gates[two].running.Load() == 1 })
	third := s.startChat(t, "the third")
	s.wantWaiting(t, 1)
	gates[one].pass(t, http.StatusTooManyRequests)
	// A refusal marks the worker down for half a second, then the third gets
	// that slot.
	eventually(t, 5*time.Second, "the third is served", func() bool { return engines[one].Requests() == 2 })
	fourth := s.startChat(t, "the fourth")
	s.wantWaiting(t, 2)
	gates[two].pass(t, http.StatusOK)
	eventually(t, 5*time.Second, "the next one is served", func() bool { return engines[two].Requests() == 2 })
	if last := engines[two].Journal()[1]; !bytes.Contains(last.Body, []byte("the first")) {
		t.Errorf("%s was served, want the first", last.Body)
	}
	gates[one].opened(t)
	gates[two].opened(t)
	for i, q := range []asked{first, second, third, fourth} {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i+1, a.status, a.err)
		}
	}
	s.slotsFree(t)
}

// TestTurnedAwayRequestsAreToldSo fills the queue and exceeds its max_wait, with clients
// of two APIs.
func TestTurnedAwayRequestsAreToldSo(t *testing.T) {
	for _, v := range []struct{ path, full, late string }{
		{"/v1/chat/completions", "rate_limit_error", "server_error"},
		{"/v1/messages", "rate_limit_error", "overloaded_error"},
	} {
		t.Run(v.path, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			s := startCaddy(t, route(engines, maxRunning(1), "queue {\nmax_waiting 1\nmax_wait 1s\n}"))
			g := hold(engines[0])
			before := s.scrape(t)
			body := string(ask("x").body())
			served := s.start(t, v.path, body)
			eventually(t, 5*time.Second, "one is served", func() bool { return g.running.Load() == 1 })
			late := s.start(t, v.path, body)
			s.wantWaiting(t, 1)
			begun := time.Now()
			wantTurnedAway(t, s.post(t.Context(), v.path, []byte(body)), http.StatusTooManyRequests, "queue_full", v.full)
			if d := time.Since(begun); d > 900*time.Millisecond {
				t.Errorf("it was told so after %v, want at once", d)
			}
			wantTurnedAway(t, late.wait(t), http.StatusServiceUnavailable, "queue_timeout", v.late)
			g.pass(t, http.StatusOK)
			if a := served.wait(t); a.status != http.StatusOK {
				t.Errorf("the one that was served: status %d", a.status)
			}
			s.wantFigures(t, before, []figure{
				{queueRejected, []string{`reason="full"`}, 1},
				{queueRejected, []string{`reason="timeout"`}, 1},
				{requestsTotal, []string{`outcome="queue_rejected"`}, 2},
				{requestsTotal, []string{`outcome="ok"`}, 1},
				{queueWaits, nil, 1},
			})
			if n := engines[0].Requests(); n != 1 {
				t.Errorf("the engine was sent %d requests, want 1", n)
			}
			for _, line := range []string{markedDown, "no worker"} {
				if n := s.logged(t, line); n != 0 {
					t.Errorf("%d log lines say %q: no worker has failed", n, line)
				}
			}
			s.slotsFree(t)
		})
	}
}

func wantTurnedAway(t *testing.T, a answer, status int, code, kind string) {
	t.Helper()
	var doc struct {
		Error struct{ Type, Code, Message string }
	}
	if err := json.Unmarshal(a.body, &doc); err != nil || a.status != status || doc.Error.Code != code || doc.Error.Type != kind || doc.Error.Message == "" {
		t.Errorf("status %d, body %s; want %d with %s and %s", a.status, a.body, status, code, kind)
	}
	if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 || n > 60 {
		t.Errorf("Retry-After %q, want 1 to 60 seconds", a.header.Get("Retry-After"))
	}
}

// TestWaitIsInTheAccessLog has two requests that wait: one is served, the other is not.
func TestWaitIsInTheAccessLog(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	file := filepath.Join(t.TempDir(), "access.log")
	s := startCaddy(t, fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file)+
		route(engines, maxRunning(1), "queue {\nmax_waiting 1\n}"))
	g := hold(engines[0])
	all := []asked{s.startChat(t, "one")}
	eventually(t, 5*time.Second, "one is served", func() bool { return g.running.Load() == 1 })
	all = append(all, s.startChat(t, "two"))
	s.wantWaiting(t, 1)
	s.startChat(t, "three").wait(t)
	g.opened(t)
	for _, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
	}
	lines := make(map[string]int) // by outcome, and whether it waited
	eventually(t, 5*time.Second, "three lines of the access log", func() bool {
		data, err := os.ReadFile(file)
		clear(lines)
		for line := range strings.Lines(string(data)) {
			var entry struct {
				Router *struct {
					Outcome string
					Wait    float64 `json:"queue_wait"`
				} `json:"kv_router"`
			}
			if json.Unmarshal([]byte(line), &entry) == nil && entry.Router != nil {
				lines[fmt.Sprintf("%s %v", entry.Router.Outcome, entry.Router.Wait > 0)]++
			}
		}
		return err == nil && len(lines) == 3
	})
	for _, want := range []string{"ok false", "ok true", "queue_rejected false"} {
		if lines[want] != 1 {
			t.Errorf("the access log has %v, want one of %q", lines, want)
		}
	}
	s.slotsFree(t)
}

// TestHeldRefusalGoesFirst has one engine refuse a request, which then waits in vain for
// the other one. The client gets the refusal.
func TestHeldRefusalGoesFirst(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1), "queue {\nmax_wait 300ms\n}"))
	gates := []*gate{hold(engines[0]), hold(engines[1])}
	all := []asked{s.startChat(t, "one"), s.startChat(t, "two")}
	eventually(t, 5*time.Second, "both are served", func() bool { return gates[0].running.Load()+gates[1].running.Load() == 2 })
	gates[0].pass(t, http.StatusServiceUnavailable)
	var refused answer
	var other asked
	select {
	case refused = <-all[0].answer:
		other = all[1]
	case refused = <-all[1].answer:
		other = all[0]
	case <-time.After(10 * time.Second):
		t.Fatal("no answer")
	}
	if refused.status != http.StatusServiceUnavailable || refused.engine() != "e1" {
		t.Errorf("status %d from %q: %s; want e1's own 503", refused.status, refused.engine(), refused.body)
	}
	gates[1].pass(t, http.StatusOK)
	if a := other.wait(t); !a.ok() || a.engine() != "e2" {
		t.Errorf("the other: status %d from %q", a.status, a.engine())
	}
	s.slotsFree(t)
}

// TestFullModelStopsNoOther has requests that wait for a model, and requests for another
// model whose worker has a free slot.
func TestFullModelStopsNoOther(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(2),
		fmt.Sprintf("worker %s {\nmodels a\n}\nworker %s {\nmodels b\n}", engines[0].Addr(), engines[1].Addr())))
	g := hold(engines[0])
	chatOf := func(model string) string {
		c := ask("hi")
		c.Model = model
		return string(c.body())
	}
	var waiting []asked
	for range 6 {
		waiting = append(waiting, s.start(t, "/v1/chat/completions", chatOf("a")))
	}
	s.wantWaiting(t, 4)
	for range 20 {
		if a := s.start(t, "/v1/chat/completions", chatOf("b")).wait(t); !a.ok() || a.engine() != "e2" {
			t.Fatalf("status %d, error %v, by %q", a.status, a.err, a.engine())
		}
	}
	// Other requests need no slot.
	list := make(chan int, 1)
	go func() {
		status, _, _ := s.get(t.Context(), s.url+"/v1/models/a")
		list <- status
	}()
	eventually(t, 5*time.Second, "the model's card is asked for", func() bool { return g.running.Load() == 3 })
	g.opened(t)
	for _, q := range waiting {
		if a := q.wait(t); !a.ok() || a.engine() != "e1" {
			t.Errorf("status %d, error %v, by %q", a.status, a.err, a.engine())
		}
	}
	if status := <-list; status != http.StatusOK {
		t.Errorf("the model's card: status %d", status)
	}
	s.slotsFree(t)
}
