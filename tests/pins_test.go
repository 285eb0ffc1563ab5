package tests

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestPinnedRequestsGoWhereTheySay pins requests of each kind to each of three workers, in
// each way.
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
			{`{"decode_worker_id":` + id + `,"prefill_worker_id":` + id + `,"dp_rank":0,"prefill_dp_rank":0}`, nil}, // as the router's answers do
			{`{"backend_instance_id":` + id + `,"prefill_worker_id":` + id + `}`, nil},
			{`{"backend_instance_id":77}`, []string{"X-Dynamo-Worker-Instance-Id", id, "X-Dp-Rank", "0"}},
			{"", []string{"X-Worker-Instance-Id", id}},
		} {
			for _, stream := range []bool{false, true} {
				c := withHints("hello", v.nvext)
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
		x := s.explain(t, withHints("hello", `{"backend_instance_id":`+id+`}`).body())
		if x.Chosen == nil || x.Chosen.Reason != "pin" || fmt.Sprint(x.Chosen.Worker) != id || len(x.Candidates) != 1 || len(x.LeftOut) != 2 || x.LeftOut[0].Why != "not_named" {
			t.Errorf("explained: %+v", x)
		}
	}
	s.booksAtZero(t)
}

// TestImpossiblePins pins requests to workers and ranks that do not exist.
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
		{`{"decode_worker_id":2,"prefill_worker_id":1}`, nil, "nvext.prefill_worker_id: worker 1"},
		{`{"decode_worker_id":2,"prefill_worker_id":2,"dp_rank":0,"prefill_dp_rank":1}`, nil, "nvext.prefill_worker_id"},
		{`{"decode_worker_id":2,"dp_rank":0,"prefill_dp_rank":0}`, nil, "nvext.prefill_dp_rank: rank 0"},
		{`{"prefill_worker_id":1}`, nil, "nvext.prefill_worker_id: worker 1"},
		{`{"prefill_dp_rank":0}`, nil, "nvext.prefill_dp_rank: rank 0"},
		{"", []string{"X-Prefill-Instance-Id", "1", "X-Worker-Instance-Id", "2"}, "nvext.prefill_worker_id: worker 1"},
		{`{"backend_instance_id":1,"allowed_worker_ids":[2]}`, nil, "allowed_worker_ids [2]"},
		{`{"backend_instance_id":1,"routing_constraints":{"required_taints":["b"]}}`, nil, `required_taints ["b"]`},
	} {
		wantError(t, v.nvext, s.chat(t.Context(), withHints("hello", v.nvext), v.header...), 400, "invalid_pin", v.in)
		if x := s.explain(t, withHints("hello", v.nvext).body(), v.header...); x.Refused == nil || x.Refused.Code != "invalid_pin" {
			t.Errorf("%s explained: %+v", v.nvext, x)
		}
	}
	for _, e := range engines {
		equal(t, e.Requests(), 0, "requests at %s", e.Name())
	}
	s.booksAtZero(t)
}

// TestPinnedRanks has a worker with two ranks: a pin to it must name the rank. A pin to a
// rank alone goes to any worker with that rank.
func TestPinnedRanks(t *testing.T) {
	two, one := startSimulated(t, engine.Config{Flavour: engine.VLLM, Ranks: 2}), startSimulated(t, engine.Config{})
	s := startCaddy(t, route([]*engine.Engine{two, one}, "response_headers X-KV-", "trust pins",
		"worker "+two.Addr()+" {\nid 1\n}\nworker "+one.Addr()+" {\nid 2\n}"))
	s.mustChat(t, simChat("hello"))
	s.awaitRanks(t, two.Addr(), 2)
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
			r := lastPost(two)
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

// TestPinnedErrorIsTheAnswer pins a request to a worker that refuses it, breaks it or is
// gone. The router tries no other worker, even if the operator allows retries. It uses the
// worker again although that is marked down.
func TestPinnedErrorIsTheAnswer(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	pinned := withHints("hello", `{"backend_instance_id":1}`)
	for _, block := range []string{"", "lb_retries 3", "lb_try_duration 1s"} {
		addrs := engines[0].Addr() + " " + engines[1].Addr()
		s := startCaddy(t, "kv_router {\n"+numbered(engines)+"trust pins\nreverse_proxy "+addrs+" {\n"+block+"\n}\n}")
		for _, f := range []canned.Fault{{Kind: canned.Status, Status: 503, Body: "busy"}, {Kind: canned.Status, Status: 429, Body: "busy"}, {Kind: canned.Status, Status: 404, Body: "busy: no model"}, {Kind: canned.CloseAfterRead}} {
			before := engines[0].Requests()
			engines[0].SetFault(f)
			a := s.chat(t.Context(), pinned)
			if f.Kind == canned.Status && (a.status != f.Status || !strings.HasPrefix(string(a.body), "busy")) || f.Kind != canned.Status && a.status != 502 {
				t.Errorf("%q, fault %v: status %d, body %.200q", block, f, a.status, a.body)
			}
			if n := engines[0].Requests() - before; n != 1 && f.Kind == canned.Status {
				t.Errorf("%q, fault %v: it was asked %d times", block, f, n)
			}
		}
		engines[0].SetFault(canned.Fault{})
		s.mustChat(t, pinned)
		engines[0].Kill()
		if a := s.chat(t.Context(), pinned); a.status != 503 {
			t.Errorf("%q: of a worker that is gone: status %d, body %.200q", block, a.status, a.body)
		}
		revive(t, engines[0])
		s.mustChat(t, pinned)
		s.booksAtZero(t)
	}
	equal(t, engines[1].Requests(), 0, "requests at the other worker")
}

// TestPinnedWorkerIsOut pins requests to a worker that Caddy's health checks have taken
// out, and to a draining one, which serves them.
func TestPinnedWorkerIsOut(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	addrs := engines[0].Addr() + " " + engines[1].Addr()
	s := startCaddy(t, "kv_router {\n"+numbered(engines)+"trust pins\nreverse_proxy "+addrs+" {\nhealth_uri /health\nhealth_interval 50ms\n}\n}")
	s.mustChat(t, withHints("hello", `{"backend_instance_id":1}`))
	s.drain(t, engines[0], "drain")
	if a := s.mustChat(t, withHints("hello", `{"backend_instance_id":1}`)); a.engine() != "e1" {
		t.Errorf("of the drained worker: answered by %s", a.engine())
	}
	engines[0].SetFault(canned.Fault{Kind: canned.Status, Status: 500})
	eventually(t, "the worker is out", func() bool {
		w := s.worker(t, engines[0].Addr())
		return w.Health.Proxy != nil && !*w.Health.Proxy
	})
	if v, known := s.available(t, engines[0].Addr()); v != 0 || !known {
		t.Errorf("the metrics say %v of a worker that is out, known: %v", v, known)
	}
	a := s.chat(t.Context(), withHints("hello", `{"backend_instance_id":1}`))
	wantError(t, "out", a, 503, "no_worker", "worker 1, which the request names")
	if a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	if all := s.pool(t).Incidents; !strings.Contains(fmt.Sprint(all), "requests pin a worker that is not available") {
		t.Errorf("the incidents are %+v", all)
	}
	s.mustChat(t, ask("hello"))
}

// TestPinnedRequestsWaitForTheirWorker gives each worker one slot. A request that is
// pinned to the full worker waits for it, although the other is idle.
func TestPinnedRequestsWaitForTheirWorker(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), maxRunning(1), "trust pins", "queue {\nmax_wait 1h\n}"))
	first := hold(engines[0])
	pinned := string(withHints("pinned", `{"backend_instance_id":1}`).body())
	a := s.start(t, "/v1/chat/completions", pinned)
	runs(t, first, 1)
	b := s.start(t, "/v1/chat/completions", pinned)
	s.wantWaiting(t, 1)
	if c := s.mustChat(t, ask("anybody")); c.engine() != "e2" {
		t.Errorf("answered by %s", c.engine())
	}
	first.opened(t)
	s.wantServed(t, "e1", a, b)
}

// TestDirectMode has require_pin: every inference request must name its worker.
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
		{"/v1/chat/completions", string(withHints("hello", `{"dp_rank":0}`).body()), nil},
		{"/v1/chat/completions", gzipped(string(ask("hello").body())), []string{"Content-Encoding", "gzip"}},
		{"/v1/messages", `{"model":"m","messages":[]}`, nil},
		{"/v1/completions", `{"model":`, nil},
	} {
		wantError(t, v.path, s.post(t.Context(), v.path, []byte(v.body), v.header...), 400, "invalid_pin", text)
	}
	for i, e := range engines {
		id := fmt.Sprint(i + 1)
		if a := s.mustChat(t, withHints("hello", `{"backend_instance_id":`+id+`}`)); a.engine() != e.Name() {
			t.Errorf("worker %s: answered by %s", id, a.engine())
		}
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(gzipped("{}")), "Content-Encoding", "gzip", "X-Worker-Instance-Id", id); a.engine() != e.Name() {
			t.Errorf("compressed, worker %s: status %d, answered by %s", id, a.status, a.engine())
		}
	}
	// paths that belong to no known API, but compute on some engine
	body := `{"model":"m","messages":[],"prompt":"x"}`
	for _, path := range []string{"/invocations", "/completion", "/api/chat", "/infill", "/v1/images/generations", "/v2/embed"} {
		wantError(t, path, s.post(t.Context(), path, []byte(body)), 400, "invalid_pin", "Worker ID required")
		named := strings.Replace(body, "{", `{"nvext":{"backend_instance_id":1},`, 1)
		if a := s.post(t.Context(), path, []byte(named)); a.engine() != "e1" || strings.Contains(string(lastOf(engines[0]).Body), "nvext") {
			t.Errorf("%s that names it in nvext: status %d, the engine got %s", path, a.status, lastOf(engines[0]).Body)
		}
	}
	if a := s.post(t.Context(), "/tokenize", []byte(body)); a.engine() == "" {
		t.Errorf("what computes nothing: status %d", a.status)
	}
	if status, _, err := s.get(t.Context(), s.url+"/v1/models"); status != 200 || err != nil {
		t.Errorf("not an inference request: status %d, error %v", status, err)
	}
	// Everybody is trusted with pins, and with nothing else.
	if a := s.mustChat(t, withHints("hello", `{"backend_instance_id":1,"annotations":["query_instance_id"]}`)); a.engine() != "e1" {
		t.Errorf("answered by %s, body %.200q", a.engine(), a.body)
	}
}

// responded makes a response, and returns its engine and its id.
func (s *server) responded(t *testing.T, body string, header ...string) (a answer, id string) {
	t.Helper()
	a = s.post(t.Context(), "/v1/responses", []byte(body), header...)
	_, rest, _ := strings.Cut(string(a.body), `"resp_`)
	id, _, ok := strings.Cut(rest, `"`)
	if a.status != 200 || !ok {
		t.Fatalf("status %d, body %.300q", a.status, a.body)
	}
	return a, "resp_" + id
}

// TestResponsesReturnToTheirEngine has three engines. Requests that name a response go to
// the engine that keeps it, and are turns of one session.
func TestResponsesReturnToTheirEngine(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-", "policy round_robin"))
	homes := map[string]bool{}
	for i := range 6 {
		a, id := s.responded(t, fmt.Sprintf(`{"model":"m","input":"hello %d","stream":%v}`, i, i%2 == 1))
		home := a.engine()
		homes[home] = true
		for range 4 {
			follow := `{"model":"m","input":"more","store":false,"previous_response_id":"` + id + `"}`
			if a := s.post(t.Context(), "/v1/responses", []byte(follow)); a.engine() != home || a.header.Get("X-KV-Reason") != "response" {
				t.Errorf("goes on from %s of %s: answered by %s, reason %s", id, home, a.engine(), a.header.Get("X-KV-Reason"))
			}
			for _, r := range []struct{ method, path string }{
				{"GET", id}, {"POST", id + "/cancel"}, {"GET", id + "/input_items?limit=1"}, {"DELETE", id},
			} {
				if a := s.sendBy(t, r.method, "/v1/responses/"+r.path, ""); a.engine() != home {
					t.Errorf("%s %s of %s: answered by %s", r.method, r.path, home, a.engine())
				}
			}
		}
	}
	if p := s.pool(t); len(homes) != 3 || p.Responses != 6 || p.Sessions != 6 {
		t.Errorf("%v made responses, %d responses and %d sessions are remembered", homes, p.Responses, p.Sessions)
	}
	if a, _ := s.responded(t, `{"model":"m","input":"x","store":false,"previous_response_id":"resp_unknown"}`); a.header.Get("X-KV-Reason") == "response" {
		t.Error("goes on from an unknown one")
	}
	equal(t, s.pool(t).Responses, 6, "responses, of which one is not stored")
	s.booksAtZero(t)
}

// TestResponseIsNamedWhileItIsMade names the response of a stream that has only begun. The
// request goes to the engine that makes the response, not to the idle one.
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
	eventually(t, "its response is known", func() bool { return s.pool(t).Responses == 1 })
	for range 4 {
		if a := s.sendBy(t, "GET", "/v1/responses/resp_slow", ""); a.engine() != home.Load() {
			t.Errorf("answered by %s, and %s makes it", a.engine(), home.Load())
		}
	}
}
