package tests

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	fallbacksTotal = "caddy_kv_router_fallbacks_total"
	inputTokens    = "caddy_kv_router_input_tokens"
	outputTokens   = "caddy_kv_router_output_tokens"
	workerTokens   = "caddy_kv_router_worker_tokens_total"
	firstToken     = "caddy_kv_router_time_to_first_token_seconds"
	betweenTokens  = "caddy_kv_router_inter_token_latency_seconds"
)

// figure is the expected growth of a metric.
type figure struct {
	name   string
	labels []string
	grown  float64
}

// wantFigures waits until all metrics have grown as expected, because some grow after the
// client has its answer. It fails the test for each that does not.
func (s *server) wantFigures(t *testing.T, before metrics, want []figure) {
	t.Helper()
	grown := func(m metrics, f figure) float64 {
		return m.value(f.name, f.labels...) - before.value(f.name, f.labels...)
	}
	right(t, func() (wrong string) {
		m := s.scrape(t)
		for _, f := range want {
			if m == nil || math.Abs(grown(m, f)-f.grown) >= 1e-9*math.Max(1, f.grown) {
				wrong += fmt.Sprintf("%s%v grew by %v, want %v\n", f.name, f.labels, grown(m, f), f.grown)
			}
		}
		return wrong
	})
}

// usageAnswer answers both kinds of request with a usage object: three chunks
// with content, or one message.
func usageAnswer(usage string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Streamed") == "" {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"choices":[{"index":0,"text":"abc","message":{"role":"assistant","content":"abc"},"finish_reason":"stop"}],"usage":%s}`, usage)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, c := range "abc" {
			fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"text\":\"%c\",\"delta\":{\"content\":\"%c\"}}]}\n\n", c, c)
			http.NewResponseController(w).Flush()
		}
		fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":%s}\n\ndata: [DONE]\n\n", usage)
	}
}

// TestFiguresAreExact has traffic for which every metric is known.
func TestFiguresAreExact(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "pool figures"))
	before := s.scrape(t)
	pool := []string{`pool="figures"`}

	// 70 tokens are four full blocks of 16 and six more.
	ids := strings.TrimSuffix(strings.Repeat("7,", 70), ",")
	plain := []byte(`{"model":"m","prompt":[` + ids + `]}`)
	streamed := []byte(`{"model":"m","stream":true,"prompt":[` + ids + `]}`)
	for i, v := range []struct {
		body  []byte
		usage string
	}{
		{plain, `{"prompt_tokens":70,"completion_tokens":3}`},
		{streamed, `{"prompt_tokens":70,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":28}}`},
		{streamed, `{"prompt_tokens":70,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}`},
		{plain, `{"prompt_tokens":100,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":75}}`},
		{plain, `null`},
		// counts that cannot be
		{streamed, `{"prompt_tokens":900000000000000000,"completion_tokens":-5,"prompt_tokens_details":{"cached_tokens":1e18}}`},
		{plain, `{"prompt_tokens":-70,"completion_tokens":9e17,"prompt_tokens_details":{"cached_tokens":-28}}`},
		{plain, `{"prompt_tokens":1e400,"completion_tokens":"7","prompt_tokens_details":{"cached_tokens":[1]}}`},
	} {
		engines[0].SetHandler(usageAnswer(v.usage))
		header := []string{}
		if strings.Contains(string(v.body), "stream") {
			header = []string{"X-Streamed", "1"}
		}
		if a := s.post(t.Context(), "/v1/completions", v.body, header...); !a.ok() {
			t.Fatalf("status %d, error %v, body %q", a.status, a.err, a.body)
		}
		s.wantFigures(t, before, []figure{{requestsTotal, pool, float64(i + 1)}}) // and the lease has ended
	}
	s.wantFigures(t, before, []figure{
		{requestsTotal, pool, 8},
		{requestsTotal, []string{pool[0], `outcome="ok"`}, 8},
		{inputTokens + "_count", pool, 4},
		{inputTokens + "_sum", pool, 70 + 70 + 70 + 100},
		{outputTokens + "_count", pool, 4},
		{outputTokens + "_sum", pool, 3 + 5 + 0 + 20},
		{workerTokens, []string{pool[0], `tokens="prompt"`}, 70 + 70 + 100},
		{workerTokens, []string{pool[0], `tokens="reported"`}, 28 + 0 + 75},
		{workerTokens, []string{pool[0], `tokens="predicted"`}, 3 * 64},
		{firstToken + "_count", pool, 3},
		{betweenTokens + "_count", pool, 3},
		{fallbacksTotal, pool, 0},
		{retriesTotal, pool, 0},
	})
	s.booksAtZero(t)
}

// TestFallbacksAreCounted has each reason for a fallback, and requests without one.
func TestFallbacksAreCounted(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "pool fallbacks", "max_body 1KiB"))
	before := s.scrape(t)
	pool := `pool="fallbacks"`
	var want []figure
	total := 0
	for i, v := range []struct {
		reason, path, body string
		header             []string
	}{
		{"compressed", "/v1/chat/completions", gzipped(`{"messages":[]}`), []string{"Content-Encoding", "gzip"}},
		{"oversized", "/v1/completions", strings.Repeat(" ", 1025), nil},
		{"malformed", "/v1/chat/completions", `{"messages":`, nil},
		{"no_prompt", "/v1/chat/completions", `{"model":"m"}`, nil},
		{"", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`, []string{"Content-Encoding", "identity"}},
		{"", "/v1/audio/transcriptions", strings.Repeat(" ", 1025), nil},
	} {
		for range i + 1 {
			if a := s.post(t.Context(), v.path, []byte(v.body), v.header...); a.engine() == "" {
				t.Errorf("%s: status %d, error %v", v.reason, a.status, a.err)
			}
		}
		if v.reason != "" {
			total += i + 1
			want = append(want, figure{fallbacksTotal, []string{pool, `reason="` + v.reason + `"`}, float64(i + 1)})
		}
	}
	s.wantFigures(t, before, append(want, figure{fallbacksTotal, []string{pool}, float64(total)}))
	for _, f := range want {
		reason := strings.Trim(strings.TrimPrefix(f.labels[1], "reason="), `"`)
		equal(t, len(s.conditions(t, "fallback "+reason)), 1, "log lines that the fallback %s begins", reason)
	}
	s.booksAtZero(t)
}

// TestResendsAreBoundedAndCounted fills the proxy's connections to an engine, which closes
// each at its next request. net/http would try them all. The router lets it resend once,
// and then opens a new connection.
func TestResendsAreBoundedAndCounted(t *testing.T) {
	const conns = 6
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "pool resends"))
	all := make(chan struct{})
	engines[0].SetHandler(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-all:
		case <-r.Context().Done():
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"choices":[]}`)
	})
	first := s.startChats(t, conns)
	eventually(t, "the engine has all the connections", func() bool { return engines[0].Active() == conns })
	close(all)
	s.wantServed(t, "", first...)
	engines[0].SetHandler(nil)
	engines[0].HangUp()
	before := s.scrape(t)
	s.mustChat(t, ask("again"))
	pool := `pool="resends"`
	s.wantFigures(t, before, []figure{
		{requestsTotal, []string{pool, `outcome="ok"`}, 1},
		{retriesTotal, []string{pool, `reason="resend"`}, 1},
		{retriesTotal, []string{pool, `reason="reconnect"`}, 1},
		{retriesTotal, []string{pool}, 2},
		{workerOutcomes, []string{pool}, 1},
	})

	// From here on there is one connection, made at the first request, which
	// closes at each one after.
	for range 5 {
		s.mustChat(t, ask("again"))
	}
	s.wantFigures(t, before, []figure{
		{requestsTotal, []string{pool, `outcome="ok"`}, 6},
		{retriesTotal, []string{pool, `reason="resend"`}, 5},
		{retriesTotal, []string{pool, `reason="reconnect"`}, 1},
	})
	s.booksAtZero(t)
}

// metrics is one look at Caddy's /metrics: series, as written there, to value.
type metrics map[string]float64

// scrape reads /metrics. It returns nil when the page cannot be read, as may
// happen while the admin endpoint moves from one config to the next.
func (s *server) scrape(t testing.TB) metrics {
	t.Helper()
	status, page, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
	if err != nil || status != 200 {
		return nil
	}
	m := make(metrics)
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		series, value, ok := cutLast(line, " ")
		if !ok {
			t.Fatalf("a line of /metrics without a value: %q", line)
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("a line of /metrics with a bad value: %q", line)
		}
		m[series] = v
	}
	return m
}

func cutLast(s, sep string) (string, string, bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// sum adds up the series of a name whose labels contain all of the given ones,
// each written as name="value". It returns whether there was any.
func (m metrics) sum(name string, labels ...string) (float64, bool) {
	total, found := 0.0, false
next:
	for series, v := range m {
		base, rest, _ := strings.Cut(series, "{")
		if base != name {
			continue
		}
		for _, l := range labels {
			if !strings.Contains("{"+rest, "{"+l) && !strings.Contains(rest, ","+l) {
				continue next
			}
		}
		total, found = total+v, true
	}
	return total, found
}

// value is sum, with zero for a series that is not there.
func (m metrics) value(name string, labels ...string) float64 {
	v, _ := m.sum(name, labels...)
	return v
}

// The names of the metrics that the tests look at.
const (
	requestsTotal  = "caddy_kv_router_requests_total"
	leases         = "caddy_kv_router_leases"
	leasesExpired  = "caddy_kv_router_leases_expired_total"
	workerRequests = "caddy_kv_router_worker_requests"
	workerPrefill  = "caddy_kv_router_worker_prefill_tokens"
	workerBlocks   = "caddy_kv_router_worker_blocks"
	sessions       = "caddy_kv_router_sessions"
	retriesTotal   = "caddy_kv_router_retries_total"
	workerOutcomes = "caddy_kv_router_worker_outcomes_total"
)

// booksAtZero waits until no lease is left and no worker has load. It fails the
// test if that does not happen or the metrics are missing.
func (s *server) booksAtZero(t testing.TB) {
	t.Helper()
	var last metrics
	right(t, func() (wrong string) {
		last = s.scrape(t)
		for _, name := range []string{leases, workerRequests, workerPrefill, workerBlocks} {
			if v, found := last.sum(name); !found || v != 0 {
				wrong += fmt.Sprintf("%s = %v (there: %v), want 0\n", name, v, found)
			}
		}
		return wrong
	})
	equal(t, last.value(leasesExpired), 0, "%s, for leases that had leaked", leasesExpired)
}

// TestAttemptsCountOnce has engines fail in several ways. A worker has as many outcomes as its engine
// has had requests.
func TestAttemptsCountOnce(t *testing.T) {
	type setup = func(*canned.Engine)
	well := func(*canned.Engine) {}
	answers := func(status int) setup {
		return func(e *canned.Engine) { e.SetFault(canned.Fault{Kind: canned.Status, Status: status}) }
	}
	fails := func(k canned.Kind) setup {
		return func(e *canned.Engine) { e.SetFault(canned.Fault{Kind: k}) }
	}
	breaks := func(e *canned.Engine) { e.SetHandler(cut(nil, ": ping\n\n"+oneRole)) }
	for name, v := range map[string]struct {
		engines []setup
		outcome string // one of those that count
		leaves  bool   // the client does
	}{
		"retries":        {[]setup{answers(503), answers(429), well}, "retried", false},
		"held answer":    {[]setup{answers(503), fails(canned.ResetAfterRead)}, "unavailable", false},
		"client's error": {[]setup{answers(400), answers(400)}, "client_error", false},
		"engine's error": {[]setup{answers(500), answers(500)}, "engine_error", false},
		"rest":           {[]setup{breaks, answers(500), well}, "resumed", false},
		"no rest":        {[]setup{breaks, answers(500)}, "broken", false},
		"client leaves":  {[]setup{answers(503), fails(canned.HangBeforeHeader)}, "client_gone", true},
	} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, len(v.engines), canned.Pace{})
			s := startCaddy(t, route(engines, "pool once", "policy random"))
			for i, set := range v.engines {
				set(engines[i])
			}
			before, sent := s.scrape(t), 0
			last := engines[len(engines)-1]
			of := `outcome="` + v.outcome + `"`
			eventually(t, "an attempt that is "+v.outcome, func() bool { // which depends on the worker that is tried first
				was := last.Requests()
				q := s.start(t, "/v1/chat/completions", string(storyBody(true, "hi", "")))
				if v.leaves {
					eventually(t, "the engine that hangs has the request", func() bool { return last.Requests() > was })
					q.leave()
				}
				q.wait(t)
				sent++
				return sent >= 6 && s.scrape(t).value(workerOutcomes, of) > before.value(workerOutcomes, of)
			})
			s.booksAtZero(t)
			var want []figure
			for _, e := range engines {
				want = append(want, figure{workerOutcomes, []string{`worker="` + e.Addr() + `"`}, float64(e.Requests())})
			}
			s.wantFigures(t, before, want)
		})
	}
}

// TestFailedPhasesCountOnce has a prefill engine that fails, and streams whose decode engine does not get
// the prompt. No decode worker is blamed.
func TestFailedPhasesCountOnce(t *testing.T) {
	for _, f := range []engine.Flavour{engine.VLLM, engine.SGLang} { // one phase after the other, and both at once
		t.Run(string(f), func(t *testing.T) {
			p := startApart(t, engine.Config{Flavour: f}, 2, 2, "split always", "policy round_robin")
			// talk returns how many requests had two workers.
			talk := func() (split float64) {
				for i := range 6 {
					c := long(i)
					c.Stream = true
					a := p.chat(t.Context(), c)
					if !a.ok() {
						t.Errorf("request %d: %v", i, a.err)
					}
					if a.wasSplit() {
						split++
					}
				}
				p.settled(t)
				return split
			}
			of := func(e *engine.Engine, outcome ...string) float64 {
				labels := []string{`worker="` + e.Addr() + `"`}
				if outcome != nil {
					labels = append(labels, `outcome="`+outcome[0]+`"`)
				}
				return p.scrape(t).value(workerOutcomes, labels...)
			}
			bad, good := p.prefill[0], p.prefill[1]
			all, prefilled := of(bad), of(good, "prefilled")
			bad.SetFault(engine.Fault{Kind: engine.Status, Status: http.StatusInternalServerError}) //nolint:errcheck // it is valid
			split := talk()
			if n, retried := of(bad)-all, of(bad, "retried"); n == 0 || n != retried {
				t.Errorf("the bad worker failed %v of %v attempts", retried, n)
			}
			equal(t, of(good, "prefilled")-prefilled, split, "prefills of the other one")
			bad.SetFault(engine.Fault{})                                  //nolint:errcheck // it is valid
			p.decode[0].SetFault(engine.Fault{Kind: engine.FailTransfer}) //nolint:errcheck // it is valid
			talk()
			for i, e := range p.decode {
				if n, ok := of(e), of(e, "ok"); n != ok {
					t.Errorf("decode worker %d failed %v attempts", i, n-ok)
				}
			}
		})
	}
}
