package tests

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestPinnedRequestsGoWhereTheySay names each of three workers in each way, on
// requests of each kind.
func TestPinnedRequestsGoWhereTheySay(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-", "trust pins explain"))
	for i, e := range engines {
		id := fmt.Sprint(i + 1)
		for _, v := range []struct {
			nvext  string
			header []string
		}{
			{`{"backend_instance_id":` + id + `}`, nil},
			{`{"decode_worker_id":` + id + `,"backend_instance_id":77}`, nil}, // the phase's own goes before
			{`{"backend_instance_id":` + id + `,"dp_rank":0,"prefill_dp_rank":4294967295}`, nil},
			{`{"backend_instance_id":77}`, []string{"X-Dynamo-Worker-Instance-Id", id, "X-Dp-Rank", "0"}},
			{"", []string{"X-Worker-Instance-Id", id}},
		} {
			for _, stream := range []bool{false, true} {
				c := wishing("hello", v.nvext)
				c.Stream = stream
				if a := s.chat(t.Context(), c, v.header...); !a.ok() || a.engine() != e.Name() || a.header.Get("X-KV-Reason") != "pin" || a.header.Get("X-KV-Worker") != id {
					t.Errorf("%s %v: status %d, answered by %s, header %v", v.nvext, v.header, a.status, a.engine(), a.header)
				}
			}
		}
		for _, path := range []string{"/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/v1/anything"} {
			if a := s.post(t.Context(), path, []byte(`{"model":"m","input":"x","messages":[]}`), "X-Worker-Instance-Id", id); a.engine() != e.Name() {
				t.Errorf("%s for worker %s: status %d, answered by %s", path, id, a.status, a.engine())
			}
		}
		x := s.explain(t, wishing("hello", `{"backend_instance_id":`+id+`}`).body())
		if x.Chosen == nil || x.Chosen.Reason != "pin" || fmt.Sprint(x.Chosen.Worker) != id || len(x.Candidates) != 1 || len(x.LeftOut) != 2 || x.LeftOut[0].Why != "not_named" {
			t.Errorf("explained: %+v", x)
		}
	}
	s.booksAtZero(t)
}

// TestImpossiblePins names what is not there.
func TestImpossiblePins(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines, "taints a", "taints b"), "trust pins overrides"))
	for _, v := range []struct {
		nvext  string
		header []string
		in     string
	}{
		{`{"backend_instance_id":18446744073709551615}`, nil, "nvext.backend_instance_id: no worker of this pool has the id 18446744073709551615"},
		{`{"decode_worker_id":0}`, nil, "nvext.decode_worker_id"},
		{"", []string{"X-Worker-Instance-Id", "3"}, "id 3"},
		{`{"backend_instance_id":1,"dp_rank":1}`, nil, "nvext.dp_rank: worker 1 has no rank 1"},
		{`{"dp_rank":9}`, nil, "nvext.dp_rank: no worker has the rank 9"},
		{`{"prefill_worker_id":1}`, nil, "nvext.prefill_worker_id: worker 1"},
		{`{"prefill_dp_rank":0}`, nil, "nvext.prefill_dp_rank: rank 0"},
		{"", []string{"X-Prefill-Instance-Id", "1", "X-Worker-Instance-Id", "2"}, "nvext.prefill_worker_id: worker 1"},
		{`{"backend_instance_id":1,"allowed_worker_ids":[2]}`, nil, "allowed_worker_ids [2]"},
		{`{"backend_instance_id":1,"routing_constraints":{"required_taints":["b"]}}`, nil, `required_taints ["b"]`},
	} {
		wantError(t, v.nvext, s.chat(t.Context(), wishing("hello", v.nvext), v.header...), 400, "invalid_pin", v.in)
		if x := s.explain(t, wishing("hello", v.nvext).body(), v.header...); x.Refused == nil || x.Refused.Code != "invalid_pin" {
			t.Errorf("%s explained: %+v", v.nvext, x)
		}
	}
	for _, e := range engines {
		if n := e.Requests(); n != 0 {
			t.Errorf("%s was sent %d requests", e.Name(), n)
		}
	}
	s.booksAtZero(t)
}

// TestPinnedRanks has a worker with two ranks, where a pin must say which. It
// also pins to a rank alone, which any worker with that rank may serve.
func TestPinnedRanks(t *testing.T) {
	two, one := startSimulated(t, engine.Config{Flavour: engine.VLLM, Ranks: 2}), startSimulated(t, engine.Config{})
	s := startCaddy(t, simulated([]*engine.Engine{two, one}, "response_headers X-KV-", "trust pins",
		"worker "+two.Addr()+" {\nid 1\n}\nworker "+one.Addr()+" {\nid 2\n}"))
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the ranks to be known", func() bool { return len(s.told(t, two).Ranks) == 2 })
	c := func(nvext string) chat {
		c := simChat("hello")
		c.Nvext = []byte(nvext)
		return c
	}
	wantError(t, "no rank", s.chat(t.Context(), c(`{"backend_instance_id":1}`)), 400, "invalid_pin",
		"Pinned worker 1 requires an explicit dp_rank because it has multiple or unknown DP ranks")
	wantError(t, "rank 2", s.chat(t.Context(), c(`{"backend_instance_id":1,"dp_rank":2}`)), 400, "invalid_pin", "its ranks are 0 to 1")
	for range 3 {
		for rank := range 2 {
			a := s.mustChat(t, c(fmt.Sprintf(`{"backend_instance_id":1,"dp_rank":%d}`, rank)))
			r := two.Journal()[len(two.Journal())-1]
			if a.header.Get("X-KV-Dp-Rank") != fmt.Sprint(rank) || r.Rank != rank || r.RankFrom != "header" {
				t.Errorf("rank %d: answered by rank %s, the engine was asked for %d by %q", rank, a.header.Get("X-KV-Dp-Rank"), r.Rank, r.RankFrom)
			}
		}
		if a := s.mustChat(t, c(`{"dp_rank":1}`)); a.header.Get("X-KV-Worker") != "1" || a.header.Get("X-KV-Dp-Rank") != "1" || a.header.Get("X-KV-Reason") == "pin" {
			t.Errorf("a rank alone: header %v", a.header)
		}
	}
	s.booksAtZero(t)
}

// TestPinnedToAWorkerThatDies has clients that name one of two workers while
// that one dies and comes back. Their errors are its own: nothing they send
// reaches the other one.
func TestPinnedToAWorkerThatDies(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{Words: 4, PerWord: time.Millisecond})
	s := startCaddy(t, route(engines, numbered(engines), "trust pins", "retry_budget 1000% 1000/s"))
	var served, failed, odd atomic.Int64
	var clients sync.WaitGroup
	for i := range 16 {
		clients.Go(func() {
			for n := range 40 {
				c := wishing(fmt.Sprintf("pinned %d, %d", i, n), `{"backend_instance_id":1}`)
				c.Stream = n%2 == 0
				switch a := s.chat(t.Context(), c, "X-Session-Id", fmt.Sprint("session ", i)); {
				case a.ok() && a.engine() == "e1":
					served.Add(1)
				case a.status == 502 || a.status == 503 || a.engine() == "e1" || a.status == 200 && !a.whole:
					failed.Add(1)
					time.Sleep(5 * time.Millisecond)
				default:
					odd.Add(1)
					t.Errorf("status %d by %s, error %v, body %.200q", a.status, a.engine(), a.err, a.body)
				}
			}
		})
	}
	eventually(t, 10*time.Second, "some are served", func() bool { return served.Load() > 50 })
	engines[0].Kill()
	eventually(t, 10*time.Second, "some fail", func() bool { return failed.Load() > 50 })
	if err := engines[0].Restart(); err != nil {
		t.Fatal(err)
	}
	clients.Wait()
	t.Logf("%d served, %d failed", served.Load(), failed.Load())
	if n := engines[1].Requests(); n != 0 {
		t.Errorf("the other worker was sent %d requests", n)
	}
	eventually(t, 10*time.Second, "it serves again, though it was marked down", func() bool {
		return s.chat(t.Context(), wishing("again", `{"backend_instance_id":1}`)).ok()
	})
	s.booksAtZero(t)
}

// TestPinnedErrorIsTheAnswer has a worker that refuses: another one is not
// asked, also where the operator lets requests be tried again.
func TestPinnedErrorIsTheAnswer(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, block := range []string{"", "lb_retries 3", "lb_try_duration 3s"} {
		addrs := engines[0].Addr() + " " + engines[1].Addr()
		s := startCaddy(t, "kv_router {\n"+numbered(engines)+"trust pins\nreverse_proxy "+addrs+" {\n"+block+"\n}\n}")
		for _, f := range []canned.Fault{{Kind: canned.Status, Status: 503, Body: "busy"}, {Kind: canned.Status, Status: 429, Body: "busy"}, {Kind: canned.Status, Status: 404, Body: "busy: no model"}, {Kind: canned.CloseAfterRead}} {
			before := engines[0].Requests()
			engines[0].SetFault(f)
			a := s.chat(t.Context(), wishing("hello", `{"backend_instance_id":1}`))
			if f.Kind == canned.Status && (a.status != f.Status || !strings.HasPrefix(string(a.body), "busy")) || f.Kind != canned.Status && a.status != 502 {
				t.Errorf("%q, fault %v: status %d, body %.200q", block, f, a.status, a.body)
			}
			if n := engines[0].Requests() - before; n != 1 && f.Kind == canned.Status {
				t.Errorf("%q, fault %v: it was asked %d times", block, f, n)
			}
		}
		engines[0].SetFault(canned.Fault{})
		s.booksAtZero(t)
	}
	if n := engines[1].Requests(); n != 0 {
		t.Errorf("the other worker was sent %d requests", n)
	}
}

// TestPinnedWorkerIsOut has a named worker that Caddy's health checks have out,
// and one that is drained, which serves what names it.
func TestPinnedWorkerIsOut(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	addrs := engines[0].Addr() + " " + engines[1].Addr()
	s := startCaddy(t, "kv_router {\n"+numbered(engines)+"trust pins\nreverse_proxy "+addrs+" {\nhealth_uri /health\nhealth_interval 50ms\n}\n}")
	s.mustChat(t, wishing("hello", `{"backend_instance_id":1}`))
	s.drain(t, engines[0], "drain")
	if a := s.mustChat(t, wishing("hello", `{"backend_instance_id":1}`)); a.engine() != "e1" {
		t.Errorf("of the drained worker: answered by %s", a.engine())
	}
	engines[0].SetFault(canned.Fault{Kind: canned.Status, Status: 500})
	eventually(t, 10*time.Second, "the worker is out", func() bool {
		w := s.worker(t, engines[0])
		return w.Health.Proxy != nil && !*w.Health.Proxy
	})
	a := s.chat(t.Context(), wishing("hello", `{"backend_instance_id":1}`))
	wantError(t, "out", a, 503, "no_worker", "worker 1, which the request names")
	if a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	met := false
	for _, in := range s.pool(t).Incidents {
		met = met || in.What == "a worker that requests name is not available"
	}
	if !met {
		t.Errorf("the incidents are %+v", s.pool(t).Incidents)
	}
	s.mustChat(t, ask("hello"))
}

// TestPinnedRequestsWaitForTheirWorker has one slot at each worker: what names a
// full worker waits for that one, though the other is idle.
func TestPinnedRequestsWaitForTheirWorker(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines, "max_running 1", "max_running 1"), "trust pins", "queue {\nmax_wait 10s\n}"))
	first := hold(engines[0])
	pinned := string(wishing("pinned", `{"backend_instance_id":1}`).body())
	a := s.start(t, "/v1/chat/completions", pinned)
	eventually(t, 5*time.Second, "the first is there", func() bool { return first.running.Load() == 1 })
	b := s.start(t, "/v1/chat/completions", pinned)
	s.wantWaiting(t, 1)
	if c := s.mustChat(t, ask("anybody")); c.engine() != "e2" {
		t.Errorf("answered by %s", c.engine())
	}
	first.pass(t, http.StatusOK)
	first.pass(t, http.StatusOK)
	for _, q := range []asked{a, b} {
		if x := q.wait(t); !x.ok() || x.engine() != "e1" {
			t.Errorf("status %d by %s", x.status, x.engine())
		}
	}
	s.slotsFree(t)
}

// TestPinDoesNotMoveTheSession has a session that is bound, one turn of which
// names another worker; and one that is not bound yet.
func TestPinDoesNotMoveTheSession(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "trust pins", affinity("hard")))
	home := s.mustChat(t, ask("hello"), "X-Session-Id", "one").engine()
	other := map[string]string{"e1": "2", "e2": "1"}[home]
	if a := s.mustChat(t, ask("hello"), "X-Session-Id", "one", "X-Worker-Instance-Id", other); a.engine() == home {
		t.Errorf("the pinned turn was answered by %s", a.engine())
	}
	if a := s.mustChat(t, ask("hello"), "X-Session-Id", "one"); a.engine() != home {
		t.Errorf("the session has moved to %s", a.engine())
	}
	s.mustChat(t, ask("hello"), "X-Session-Id", "two", "X-Worker-Instance-Id", other)
	if a := s.mustChat(t, ask("hello"), "X-Session-Id", "two"); a.engine() == home {
		t.Error("the new session was not bound by its pinned turn")
	}
}

// TestDirectMode has every inference request name its worker.
func TestDirectMode(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "require_pin", "response_headers X-KV-"))
	const text = "Worker ID required (--direct-route) but none found in request. " +
		"Expected decode_worker_id or backend_instance_id to be set by external router (e.g., EPP)."
	for _, v := range []struct {
		path, body string
		header     []string
	}{
		{"/v1/chat/completions", string(ask("hello").body()), nil},
		{"/v1/chat/completions", string(wishing("hello", `{"dp_rank":0}`).body()), nil},
		{"/v1/chat/completions", gzipped(string(ask("hello").body())), []string{"Content-Encoding", "gzip"}},
		{"/v1/messages", `{"model":"m","messages":[]}`, nil},
		{"/v1/completions", `{"model":`, nil},
	} {
		wantError(t, v.path, s.post(t.Context(), v.path, []byte(v.body), v.header...), 400, "invalid_pin", text)
	}
	for i, e := range engines {
		id := fmt.Sprint(i + 1)
		if a := s.mustChat(t, wishing("hello", `{"backend_instance_id":`+id+`}`)); a.engine() != e.Name() {
			t.Errorf("worker %s: answered by %s", id, a.engine())
		}
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(gzipped("{}")), "Content-Encoding", "gzip", "X-Worker-Instance-Id", id); a.engine() != e.Name() {
			t.Errorf("compressed, worker %s: status %d, answered by %s", id, a.status, a.engine())
		}
	}
	if status, _, err := s.get(t.Context(), s.url+"/v1/models"); status != 200 || err != nil {
		t.Errorf("not an inference request: status %d, error %v", status, err)
	}
	// Everybody is trusted with pins, and with nothing else.
	if a := s.mustChat(t, wishing("hello", `{"backend_instance_id":1,"annotations":["query_instance_id"]}`)); a.engine() != "e1" {
		t.Errorf("answered by %s, body %.200q", a.engine(), a.body)
	}
}

// TestResponsesReturnToTheirEngine has three engines, and requests that name
// responses of theirs: they go where these are kept.
func TestResponsesReturnToTheirEngine(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-", "policy round_robin"))
	first := func(input, more string) (engine, id string) {
		t.Helper()
		a := s.post(t.Context(), "/v1/responses", []byte(`{"model":"m","input":"`+input+`"`+more+`}`))
		_, rest, _ := strings.Cut(string(a.body), `"resp_`)
		id, _, _ = strings.Cut(rest, `"`)
		if a.status != 200 || id == "" {
			t.Fatalf("status %d, body %.300q", a.status, a.body)
		}
		return a.engine(), "resp_" + id
	}
	homes := map[string]bool{}
	for i := range 6 {
		more := `,"stream":true`
		if i%2 == 0 {
			more = ""
		}
		home, id := first(fmt.Sprint("hello ", i), more)
		homes[home] = true
		for range 4 {
			follow := `{"model":"m","input":"more","store":false,"previous_response_id":"` + id + `"}`
			if a := s.post(t.Context(), "/v1/responses", []byte(follow), "X-Session-Id", "s"); a.engine() != home || a.header.Get("X-KV-Reason") != "response" {
				t.Errorf("goes on from %s of %s: answered by %s, reason %s", id, home, a.engine(), a.header.Get("X-KV-Reason"))
			}
			for _, r := range []struct{ method, path string }{
				{"GET", id}, {"POST", id + "/cancel"}, {"GET", id + "/input_items?limit=1"}, {"DELETE", id},
			} {
				req, _ := http.NewRequestWithContext(t.Context(), r.method, s.url+"/v1/responses/"+r.path, http.NoBody)
				if a := s.do(req); a.engine() != home {
					t.Errorf("%s %s of %s: answered by %s", r.method, r.path, home, a.engine())
				}
			}
		}
	}
	if len(homes) != 3 {
		t.Errorf("only %v made responses", homes)
	}
	if p := s.pool(t); p.Responses != 6 || p.Sessions != 1 {
		t.Errorf("%d responses and %d sessions are remembered", p.Responses, p.Sessions)
	}
	if a := s.post(t.Context(), "/v1/responses", []byte(`{"model":"m","input":"x","previous_response_id":"resp_unknown"}`)); a.status != 200 || a.header.Get("X-KV-Reason") == "response" {
		t.Errorf("goes on from an unknown one: status %d, reason %s", a.status, a.header.Get("X-KV-Reason"))
	}
	before := s.pool(t).Responses
	first("something else", `,"store":false`)
	if n := s.pool(t).Responses; n != before {
		t.Errorf("what is not stored was remembered: %d entries, then %d", before, n)
	}
	s.booksAtZero(t)
}

// TestResponseIsNamedWhileItIsMade has a stream that has only begun. A request
// for its response goes to the engine that makes it, and not to the idle one.
func TestResponseIsNamedWhileItIsMade(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	end := make(chan struct{})
	defer close(end)
	var home atomic.Value
	for _, e := range engines {
		e.SetHandler(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPost {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, "{}")
				return
			}
			home.Store(e.Name())
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_slow\",\"status\":\"in_progress\"}}\n\n")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-end:
			case <-r.Context().Done():
			}
		})
	}
	q := s.start(t, "/v1/responses", `{"model":"m","input":"x","stream":true}`)
	defer q.leave()
	eventually(t, 5*time.Second, "its response is known", func() bool { return s.pool(t).Responses == 1 })
	for range 4 {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", s.url+"/v1/responses/resp_slow", http.NoBody)
		if a := s.do(req); a.engine() != home.Load() {
			t.Errorf("answered by %s, and %s makes it", a.engine(), home.Load())
		}
	}
}
