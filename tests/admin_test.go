package tests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// api makes a request to kv_router's part of the admin endpoint. It decodes the answer
// into v, unless v is nil, and returns the status and the whole answer.
func (s *server) api(t testing.TB, method, path string, body []byte, v any, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.admin+"/kv_router"+path, bytes.NewReader(body))
	noError(t, err)
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	// After a reload the admin endpoint from before closes connections that it has
	// accepted, but not read from.
	for again := 0; again < 3 && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)); again++ {
		req = req.Clone(req.Context())
		req.Body = io.NopCloser(bytes.NewReader(body))
		resp, err = s.client.Do(req)
	}
	noError(t, err)
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	noError(t, err)
	equal(t, resp.Header.Get("Content-Type"), "application/json", "%s %s: Content-Type", method, path)
	if v != nil {
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s %s: status %d: %s", method, path, resp.StatusCode, out)
		}
		if err := json.Unmarshal(out, v); err != nil {
			t.Fatalf("%s %s: %v: %s", method, path, err, out)
		}
	}
	return resp.StatusCode, string(out)
}

// The parts of the admin API's answers that the tests look at.
type (
	adminPool struct {
		Name      string `json:"name"`
		Workers   int    `json:"workers"`
		Draining  int    `json:"draining_workers"`
		Leases    int    `json:"leases"`
		Sessions  int    `json:"sessions"`
		Responses int    `json:"responses"`
		Settings  struct {
			TextBlock int    `json:"text_block_bytes"`
			BlockSize int    `json:"block_size_tokens"`
			From      string `json:"block_size_from"`
		} `json:"settings"`
		IndexBlocks int64 `json:"index_blocks"`
		Incidents   []struct {
			What string `json:"what"`
		} `json:"incidents"`
	}
	adminWorker struct {
		ID       uint64 `json:"id"`
		Dial     string `json:"dial"`
		Draining bool   `json:"draining"`
		Drained  bool   `json:"drained"`
		Engine   struct {
			Type    string `json:"type"`
			Source  string `json:"source"`
			Version string `json:"version"`
			Told    struct {
				KVTokens  int64      `json:"kv_tokens_per_rank"`
				BlockSize int        `json:"block_size_tokens"`
				DPSize    int        `json:"dp_size"`
				Context   int64      `json:"context_tokens"`
				Running   int        `json:"max_running_requests_per_rank"`
				Started   *time.Time `json:"started"`
			} `json:"info"`
			Warnings []struct{ What, Effect, Advice string } `json:"warnings"`
		} `json:"engine"`
		Models struct {
			Told []string `json:"listed"`
		} `json:"models"`
		State  string `json:"state"`
		Health struct {
			Available bool    `json:"available"`
			Proxy     *bool   `json:"proxy_available"`
			Failures  int     `json:"failures_in_a_row"`
			Answers   float64 `json:"recent_answers"`
			Errors    float64 `json:"recent_errors"`
			LetBack   *int    `json:"trial_requests"`

			ErrorsApart bool `json:"errors_apart"`
		} `json:"health"`
		Load struct {
			Requests int    `json:"requests"`
			Running  int    `json:"running_requests"`
			Max      *int   `json:"max_running_requests"`
			From     string `json:"max_running_from"`
			Outlier  bool   `json:"outlier"`
		} `json:"load"`
		Cache struct {
			Capacity int64  `json:"capacity_tokens"`
			Reported *int64 `json:"capacity_reported_tokens"`
			Learned  bool   `json:"capacity_learned"`
			Cached   int64  `json:"cached_tokens"`
		} `json:"cache"`
		Ranks []struct {
			Rank  int `json:"dp_rank"`
			Cache struct {
				Capacity int64 `json:"capacity_tokens"`
				Cached   int64 `json:"cached_tokens"`
			} `json:"cache"`
			Load struct {
				Others int `json:"other_routers_requests"`
			} `json:"load"`
			Accuracy struct {
				Timings int `json:"timings"`
			} `json:"latency"`
			Engine *struct {
				Others int     `json:"other_clients_requests"`
				Age    float64 `json:"age_seconds"`
			} `json:"engine_load"`
		} `json:"dp_ranks"`
	}
	adminSession struct {
		Hash    string  `json:"key_hash"`
		Bound   bool    `json:"bound"`
		Dial    string  `json:"dial"`
		TTL     float64 `json:"ttl_seconds"`
		Expires float64 `json:"expires_in_seconds"`
	}
	adminExplained struct {
		Refused *struct {
			Status int    `json:"status"`
			Code   string `json:"code"`
		} `json:"refused"`
		Policy string `json:"policy"`
		Phases *struct {
			Split   bool   `json:"split"`
			Why     string `json:"whole_because"`
			Prefill struct {
				Worker uint64 `json:"worker"`
			} `json:"prefill"`
		} `json:"phases"`
		Plan struct {
			API      string        `json:"api"`
			Model    string        `json:"model"`
			Public   string        `json:"public_model"`
			Kind     string        `json:"prompt_kind"`
			Tokens   int64         `json:"prompt_tokens"`
			Blocks   int           `json:"prompt_blocks"`
			Fallback string        `json:"fallback"`
			Session  *adminSession `json:"session"`
		} `json:"plan"`
		Candidates []struct {
			Worker  uint64  `json:"worker"`
			Dial    string  `json:"dial"`
			Overlap float64 `json:"overlap_blocks"`
			Tokens  int64   `json:"overlap_tokens"`
			Source  string  `json:"knowledge"`
			Cost    float64 `json:"cost"`
			Wait    float64 `json:"wait_ms"`
			Work    float64 `json:"recent_work_ms"`
			Active  int     `json:"requests"`
			Outlier bool    `json:"outlier"`
		} `json:"candidates"`
		LeftOut []struct {
			Dial string `json:"dial"`
			Why  string `json:"why"`
		} `json:"left_out"`
		Chosen *struct {
			Worker   uint64 `json:"worker"`
			Reason   string `json:"reason"`
			Sentence string `json:"sentence"`
			Drawn    []struct {
				Worker uint64 `json:"worker"`
			} `json:"drawn_among"`
		} `json:"chosen"`
	}
)

const defaultPool = "/pools/default"

func (s *server) pool(t testing.TB) (p adminPool) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	return p
}

// worker returns the admin API's view of the worker at an address.
func (s *server) worker(t testing.TB, dial string) (w adminWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool+"/workers/"+dial, nil, &w)
	return w
}

// workers returns those of all workers.
func (s *server) workers(t testing.TB) (list []adminWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool+"/workers", nil, &list)
	return list
}

// awaitType waits until the router has found out what an engine is.
func (s *server) awaitType(t testing.TB, dial, kind string) {
	t.Helper()
	eventually(t, "the engine to be found out", func() bool { return s.worker(t, dial).Engine.Type == kind })
}

// awaitModels waits until the router has the list of models of each worker.
func (s *server) awaitModels(t testing.TB) {
	t.Helper()
	eventually(t, "the lists of models", func() bool {
		return !slices.ContainsFunc(s.workers(t), func(w adminWorker) bool { return len(w.Models.Told) == 0 })
	})
}

// awaitRanks waits until the router knows the ranks of an engine.
func (s *server) awaitRanks(t testing.TB, dial string, n int) {
	t.Helper()
	eventually(t, "the ranks to be known", func() bool { return len(s.worker(t, dial).Ranks) == n })
}

func (s *server) explain(t testing.TB, body []byte, header ...string) (x adminExplained) {
	t.Helper()
	s.api(t, http.MethodPost, defaultPool+"/explain?path=/v1/chat/completions", body, &x, header...)
	return x
}

// rejected makes a configuration fail after kv_router was provisioned.
const rejected = "\nreverse_proxy /elsewhere 127.0.0.1:1 {\n\ttransport http {\n\t\ttls_trust_pool file /nonexistent/ca.pem\n\t}\n}"

// TestSessionsByPage reads sessions page by page, and unbinds each by its key or its hash.
func TestSessionsByPage(t *testing.T) {
	const n, limit = 50, 10
	engines := startEngines(t, 1, canned.Pace{Words: 1})
	s := startCaddy(t, route(engines))
	for i := range n {
		s.mustChat(t, ask("hello"), "X-Session-Id", fmt.Sprintf("secret/%d", i))
	}
	seen := make(map[string]bool)
	for after, last := "", ""; len(seen) < n; {
		var page struct {
			Total    int            `json:"total_sessions"`
			Sessions []adminSession `json:"sessions"`
			Next     string         `json:"next_after"`
		}
		_, text := s.api(t, http.MethodGet, fmt.Sprintf("%s/sessions?limit=%d&after=%s", defaultPool, limit, after), nil, &page)
		after = page.Next
		if strings.Contains(text, "secret") || page.Total != n || len(page.Sessions) != limit || (after == "") != (len(seen) == n-limit) {
			t.Fatalf("after %d sessions: %s", len(seen), text)
		}
		for _, e := range page.Sessions {
			if e.Hash <= last || !e.Bound || e.TTL != 300 || e.Expires <= 0 || e.Expires > 300 {
				t.Errorf("%+v comes after %s", e, last)
			}
			last, seen[e.Hash] = e.Hash, true
		}
	}
	for i := range n {
		path := defaultPool + "/sessions/" + url.PathEscape(fmt.Sprintf("secret/%d", i)) + "?model=canned"
		var byKey, byHash, gone adminSession
		s.api(t, http.MethodGet, path, nil, &byKey)
		hashed := defaultPool + "/sessions/" + byKey.Hash + "?hashed"
		s.api(t, http.MethodGet, hashed, nil, &byHash)
		byHash.Expires = byKey.Expires
		if !seen[byKey.Hash] || byKey != byHash || byKey.Dial != engines[0].Addr() {
			t.Fatalf("by key %+v, by hash %+v", byKey, byHash)
		}
		if i%2 == 0 {
			path = hashed
		}
		s.api(t, http.MethodDelete, path, nil, &gone)
		if status, text := s.api(t, http.MethodGet, path, nil, nil); gone.Hash != byKey.Hash || status != http.StatusNotFound || strings.Contains(text, "secret") {
			t.Errorf("after it was unbound: status %d, %s", status, text)
		}
	}
	equal(t, s.pool(t).Sessions, 0, "sessions left")
}

// TestAdminRefusesWhatCannotBe sends wrong paths, methods and arguments.
func TestAdminRefusesWhatCannotBe(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	worker := defaultPool + "/workers/" + engines[0].Addr()
	for _, v := range []struct {
		method, path string
		status       int
		want         string
	}{
		{"GET", "/nothing", 404, "/kv_router/pools"},
		{"GET", "/pools/none", 404, "none"},
		{"GET", "/pools/none/workers", 404, "none"},
		{"POST", "/pools/none/explain?path=/v1/chat/completions", 404, "none"},
		{"GET", defaultPool + "/nothing", 404, "nothing"},
		{"GET", defaultPool + "/workers/no:1", 404, "no:1"},
		{"GET", defaultPool + "/workers/18446744073709551616", 404, "18446744073709551616"},
		{"POST", defaultPool + "/workers/no:1/drain", 404, "no:1"},
		{"POST", defaultPool + "/workers/no:1/undrain", 404, "no:1"},
		{"GET", defaultPool + "/sessions/none", 404, "session"},
		{"DELETE", defaultPool + "/sessions/none", 404, "session"},
		{"GET", defaultPool + "/sessions/0123456789abcdef0123456789abcdef?hashed", 404, "session"},
		{"GET", defaultPool + "/sessions/0123456789abcdef?hashed", 400, "32"},
		{"GET", defaultPool + "/sessions?limit=0", 400, "1000"},
		{"GET", defaultPool + "/sessions?limit=1001", 400, "1000"},
		{"GET", defaultPool + "/sessions?limit=many", 400, "many"},
		{"GET", defaultPool + "/sessions?after=xyz", 400, "xyz"},
		{"POST", defaultPool + "/explain", 400, "path"},
		{"POST", defaultPool + "/explain?path=v1", 400, "path"},
		{"POST", defaultPool + "/explain?path=/%25zz", 400, "path"},
		{"POST", "/pools", 405, "GET"},
		{"DELETE", defaultPool, 405, "GET"},
		{"POST", defaultPool + "/workers", 405, "GET"},
		{"DELETE", worker, 405, "GET"},
		{"GET", worker + "/drain", 405, "POST"},
		{"GET", worker + "/undrain", 405, "POST"},
		{"POST", defaultPool + "/sessions", 405, "GET"},
		{"POST", defaultPool + "/sessions/a", 405, "DELETE or GET"},
		{"GET", defaultPool + "/explain?path=/v1/chat/completions", 405, "POST"},
	} {
		var e struct {
			Error string `json:"error"`
		}
		status, text := s.api(t, v.method, v.path, nil, nil)
		if err := json.Unmarshal([]byte(text), &e); err != nil || status != v.status || !strings.Contains(e.Error, v.want) {
			t.Errorf("%s %s: status %d, want %d; %s", v.method, v.path, status, v.status, text)
		}
	}
}

// TestExplainRefusals explains requests that the router would answer itself or route by
// load alone.
func TestExplainRefusals(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "worker * {\nmodels canned\n}", "max_body 1KiB"))
	c := ask("hello")
	c.Model = "unheard-of"
	if x := s.explain(t, c.body()); x.Refused == nil || x.Refused.Status != 404 || x.Refused.Code != "model_not_found" {
		t.Errorf("unknown model: %+v", x.Refused)
	}
	c = ask("hello")
	c.Nvext = json.RawMessage(`{"session_control":7}`)
	if x := s.explain(t, c.body()); x.Refused == nil || x.Refused.Status != 400 || x.Refused.Code != "invalid_nvext" {
		t.Errorf("bad nvext: %+v", x.Refused)
	}
	for body, fallback := range map[string]string{"{": "malformed", string(ask(strings.Repeat("long ", 500)).body()): "oversized", "": "malformed"} {
		if x := s.explain(t, []byte(body)); x.Plan.Fallback != fallback || x.Refused != nil || x.Chosen == nil || len(x.Candidates) != 2 {
			t.Errorf("%.20q: %+v", body, x)
		}
	}
	var x adminExplained
	s.api(t, http.MethodPost, defaultPool+"/explain?path=/tokenize", []byte("{}"), &x)
	if x.Plan.API != "" || x.Chosen == nil || !strings.Contains(x.Chosen.Sentence, "draws") {
		t.Errorf("pass-through: %+v, %+v", x.Plan, x.Chosen)
	}
	if p := s.pool(t); p.Leases != 0 || p.IndexBlocks != 0 || p.Sessions != 0 {
		t.Errorf("explaining left something behind: %+v", p)
	}
}

// TestExplainAgreesWithTheChoice explains 1,000 random requests and then sends them. Some
// have sessions, the workers have load, and some of them drain.
func TestExplainAgreesWithTheChoice(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{Words: 4000, PerWord: time.Second}) // silent ones would be found to hang
	s := startCaddy(t, route(engines, "response_headers X-KV-", "affinity {\nttl 1h\n}"))
	rnd := rand.New(rand.NewPCG(3, 4))
	const held = 6
	for i := range held {
		c := ask(prose(rnd, 200, 4000)).streamed()
		go s.chat(t.Context(), c) // until the test ends
		eventually(t, "a lease", func() bool { return s.pool(t).Leases == i+1 })
	}
	eventually(t, "the engines to have them", func() bool {
		n := 0
		for _, e := range engines {
			n += e.Requests()
		}
		return n == held
	})
	for _, e := range engines {
		e.SetPace(canned.Pace{Words: 2})
	}
	var begins []string
	for range 12 {
		begins = append(begins, prose(rnd, 100, 4000))
	}
	cases, sure, bySession := 1000, 0, 0
	if testing.Short() {
		cases = 100
	}
	for i := range cases {
		if i%50 == 49 {
			verb := []string{"drain", "undrain"}[rnd.IntN(2)]
			s.api(t, http.MethodPost, defaultPool+"/workers/"+engines[rnd.IntN(3)].Addr()+"/"+verb, nil, new(adminWorker))
		}
		c := ask(begins[rnd.IntN(len(begins))] + prose(rnd, 1, 500))
		c.Stream = rnd.IntN(2) == 0
		var header []string
		if rnd.IntN(3) == 0 {
			header = []string{"X-Session-Id", fmt.Sprintf("session-%d", rnd.IntN(cases/25))}
		}
		eventually(t, "the books of the request before", func() bool { return s.pool(t).Leases == held })
		asked := time.Now()
		x := s.explain(t, c.body(), header...)
		if x.Chosen == nil || x.Policy != "predicted_latency" || x.Plan.Kind != "text" {
			t.Fatalf("case %d: %+v", i, x)
		}
		a := s.mustChat(t, c, header...)
		got, err := strconv.ParseUint(a.header.Get("X-KV-Worker"), 10, 64)
		noError(t, err)
		if len(x.Chosen.Drawn) == 0 {
			sure++
			cost := make(map[uint64]float64)
			for _, cand := range x.Candidates {
				cost[cand.Worker] = cand.Cost
			}
			// Costs are times, and time has gone on.
			passed := float64(time.Since(asked)) / float64(time.Millisecond)
			if x.Chosen.Worker != got && cost[got] <= 1.02*cost[x.Chosen.Worker]+2*passed {
				continue
			}
			if x.Chosen.Worker != got || x.Chosen.Reason != a.header.Get("X-KV-Reason") {
				t.Errorf("case %d: explained %+v, chose %d by %s", i, x.Chosen, got, a.header.Get("X-KV-Reason"))
			}
		} else if !strings.Contains(fmt.Sprint(x.Chosen.Drawn), fmt.Sprintf("{%d}", got)) {
			t.Errorf("case %d: explained one of %v, chose %d", i, x.Chosen.Drawn, got)
		}
		if x.Chosen.Reason == "session" {
			bySession++
		}
		for _, cand := range x.Candidates {
			if cand.Worker != got {
				continue
			}
			overlap, tokens := strconv.FormatInt(int64(cand.Overlap), 10), strconv.FormatInt(cand.Tokens, 10)
			if overlap != a.header.Get("X-KV-Overlap-Blocks") || tokens != a.header.Get("X-KV-Predicted-Cached-Tokens") {
				t.Errorf("case %d: explained %s blocks, %s tokens; it was %s and %s", i, overlap, tokens,
					a.header.Get("X-KV-Overlap-Blocks"), a.header.Get("X-KV-Predicted-Cached-Tokens"))
			}
		}
	}
	t.Logf("%d cases: %d certain, %d by session", cases, sure, bySession)
	if sure < cases/2 || bySession < cases/20 {
		t.Error("too few of them say anything")
	}
}
