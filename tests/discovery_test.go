package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddyserver/caddy/v2"
)

// inTime is the time within which the router must notice a worker's death or return
// without requests, with some reserve for the test.
const inTime = 5*time.Second + 500*time.Millisecond

// health is a worker's health in the admin API and the metrics: "yes", "no" or
// "unknown".
type health struct{ admin, refuses, metric string }

func (s *server) health(t testing.TB, dial string) health {
	t.Helper()
	var w struct {
		Health struct {
			Available *bool `json:"available"`
			Refuses   *bool `json:"refuses_connections"`
		} `json:"health"`
	}
	if status, page := s.api(t, http.MethodGet, defaultPool+"/workers/"+dial, nil, &w); status != http.StatusOK {
		t.Fatalf("worker %s: status %d: %s", dial, status, page)
	}
	word := func(yes, known bool) string {
		switch {
		case !known:
			return "unknown"
		case yes:
			return "yes"
		}
		return "no"
	}
	said := func(b *bool) string { return word(b != nil && *b, b != nil) }
	v, known := s.available(t, dial)
	return health{said(w.Health.Available), said(w.Health.Refuses), word(v == 1, known)}
}

// agreed returns a worker's health, and checks that the admin API and the metrics agree. A
// change between the two reads is no contradiction.
func (s *server) agreed(t testing.TB, dial string) health {
	t.Helper()
	a, b := s.health(t, dial), s.health(t, dial)
	if a == b && (a.admin != a.metric || a.refuses == "yes" && a.admin != "no" || (a.refuses == "unknown") != (a.admin == "unknown")) {
		t.Fatalf("worker %s: contradiction %+v", dial, a)
	}
	return b
}

// TestWorkersAreKnownWithoutRequests has live workers and one that never existed. Two die,
// return and survive a reload, all without requests.
func TestWorkersAreKnownWithoutRequests(t *testing.T) {
	alive := startEngines(t, 1, canned.Pace{})[0]
	f := startFake(t, fakeVLLM("0.20.0", func() string { return vllmRanks(1) }))
	configured := startFake(t, nil)
	dead := freeAddr(t)
	dials := []string{alive.Addr(), f.Addr(), configured.Addr(), dead}
	site := fmt.Sprintf("kv_router %s %s %s %s {\nworker %s {\nengine other\nmodels m\n}\n%%s\n}", alive.Addr(), f.Addr(), configured.Addr(), dead, configured.Addr())
	s := startCaddy(t, fmt.Sprintf(site, ""))
	become := func(when string, want map[string]string) {
		t.Helper()
		right(t, func() string {
			for _, dial := range dials {
				if h := s.agreed(t, dial); h.admin != want[dial] {
					return fmt.Sprintf("%s: worker %s is %+v, want %s", when, dial, h, want[dial])
				}
			}
			return ""
		})
	}
	want := map[string]string{alive.Addr(): "yes", f.Addr(): "yes", configured.Addr(): "yes", dead: "no"}
	become("at first", want)
	want[f.Addr()], want[configured.Addr()] = "no", "no"
	f.stop()
	configured.stop()
	become("after two have died", want)
	want[f.Addr()] = "yes" // the other one is never asked: only a request shows that it answers
	f.again(t)
	configured.again(t)
	become("after two have come back", want)
	within(t, inTime, "one request to be let in", func() bool {
		n := s.worker(t, configured.Addr()).Health.LetBack
		return n != nil && *n == 1 && s.health(t, configured.Addr()).refuses == "no"
	})
	s.mustReload(t, fmt.Sprintf(site, "index {\ntext_block 128\n}"))
	for range 20 {
		become("after a reload", want)
	}
	equal(t, s.pool(t).Settings.TextBlock, 128, "text_block of the new configuration, without a request")
}

// TestRefusedConnectionLosesTheCache stops an engine without requests and starts it again.
func TestRefusedConnectionLosesTheCache(t *testing.T) {
	for name, tells := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"vLLM": fakeVLLM("0.20.0", func() string { return "process_start_time_seconds 1763740000.5\n" + vllmRanks(1) }),
		"any":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			f := startFake(t, tells)
			s := startCaddy(t, "kv_router "+f.Addr()+" {\nresponse_headers X-KV-\n}")
			for range 2 {
				s.mustChat(t, simChat(someWords(1000)))
			}
			if s.worker(t, f.Addr()).Cache.Cached == 0 {
				t.Fatal("nothing is thought to be held")
			}
			f.stop()
			within(t, inTime, "the cache model to be cleared", func() bool { return s.worker(t, f.Addr()).Cache.Cached == 0 })
			f.again(t)
			if a := s.mustChat(t, simChat(someWords(1000))); a.header.Get("X-KV-Reason") != "load" {
				t.Errorf("the first request after it is chosen by %q", a.header.Get("X-KV-Reason"))
			}
		})
	}
}

// TestFirstPromptsOfTokenIDsAreFoundAgain sends a prompt as the very first request, which waits for the engine's block
// size. It waits for half a second after Caddy's start at most. A start counts if the size was known by then.
func TestFirstPromptsOfTokenIDsAreFoundAgain(t *testing.T) {
	for name, c := range map[string]struct {
		path, body string
		block      int
		slow       time.Duration
	}{
		"prompt, 32":      {"/v1/completions", `{"model":"sim-8b","prompt":` + idsFrom(1, 2000) + `}`, 32, 0},
		"prompt, 64 slow": {"/v1/completions", `{"model":"sim-8b","prompt":` + idsFrom(1, 2000) + `}`, 64, 100 * time.Millisecond},
		"text, 64 slow":   {"/v1/completions", `{"model":"sim-8b","prompt":"` + someWords(1000) + `"}`, 64, 100 * time.Millisecond},
	} {
		whenInTime(t, name, func(t *testing.T) bool {
			f := startFake(t, fakeVLLM("0.20.0", func() string {
				time.Sleep(c.slow)
				return fmt.Sprintf("vllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"10000\"} 1.0\n", c.block)
			}))
			s := startCaddy(t, "kv_router "+f.Addr()+" {\nresponse_headers X-KV-\n}")
			predicted := func() string {
				a := s.post(t.Context(), c.path, []byte(c.body))
				if a.status != http.StatusOK {
					t.Fatalf("status %d: %s", a.status, a.body)
				}
				return a.header.Get("X-KV-Predicted-Cached-Tokens")
			}
			first := predicted()
			eventually(t, "the block size to be known", func() bool { return s.pool(t).Settings.BlockSize == c.block })
			again := predicted()
			known := s.isInTime(t, "block size taken from the engines")
			if known && (first != "0" || again == "0") {
				t.Errorf("%s tokens of the first prompt are thought to be cached, and %s when it is sent again", first, again)
			}
			return known
		})
	}
}

// whenInTime runs a test again until its engine has sent in time what the test needs.
func whenInTime(t *testing.T, name string, test func(*testing.T) (sent bool)) {
	t.Helper()
	sent := false
	for end := time.Now().Add(patience); !sent && time.Now().Before(end) && t.Run(name, func(t *testing.T) { sent = test(t) }); {
	}
	if !sent && !t.Failed() {
		t.Errorf("%s: the engine is never in time", name)
	}
}

// isInTime returns whether the log has a line while the first requests wait.
func (s *server) isInTime(t *testing.T, line string) bool {
	t.Helper()
	return s.entries(t, line)[0].TS-s.entries(t, "server running")[0].TS < 0.5
}

// TestRejectedConfigurationAsksNobody validates and rejects configurations, before and
// while another one serves. The router probes none of their engines.
func TestRejectedConfigurationAsksNobody(t *testing.T) {
	var asked atomic.Int64
	other := startFake(t, func(http.ResponseWriter, *http.Request) bool { asked.Add(1); return false })
	f := startFake(t, nil)
	s := startCaddy(t, "kv_router "+f.Addr())
	within(t, inTime, "the worker to be known", func() bool { return s.health(t, f.Addr()).admin == "yes" })
	busy := startFake(t, nil)
	for name, load := range map[string]func() error{
		"not provisioned": func() error { return s.load("kv_router " + other.Addr() + rejected) },
		"not started": func() error {
			return s.load("kv_router " + other.Addr() + "\n}\nhttp://" + busy.Addr() + " {\nrespond hello")
		},
		"validated": func() error {
			doc, err := adapt(s.caddyfile("kv_router " + other.Addr()))
			noError(t, err)
			var cfg caddy.Config
			noError(t, json.Unmarshal(doc, &cfg))
			noError(t, caddy.Validate(&cfg))
			return fmt.Errorf("only validated")
		},
	} {
		if err := load(); err == nil {
			t.Errorf("%s: the configuration was accepted", name)
		}
	}
	was := f.asked("/v1/models")
	within(t, 3*inTime, "the next look at the worker that serves", func() bool { return f.asked("/v1/models") > was })
	if n := asked.Load(); n > 0 {
		t.Errorf("a worker of rejected configurations was asked %d times", n)
	}
	if ws := s.workers(t); len(ws) != 1 || ws[0].Dial != f.Addr() {
		t.Errorf("workers %+v, want only %s", ws, f.Addr())
	}
	s.mustChat(t, simChat("hello"))
}

// forwardProxy starts a forward proxy whose tunnels all lead to one address.
func forwardProxy(t *testing.T, to string) *httptest.Server {
	t.Helper()
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		up, err := net.Dial("tcp", to)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer up.Close()
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		go pipe(up, c)
		pipe(c, up)
	}))
	t.Cleanup(proxy.Close)
	return proxy
}

// TestWorkerBehindAForwardProxyIsNotMarkedDown has a worker with TLS that is reached only
// through a forward proxy. Its models are configured, so most probes only connect. A
// restart of the proxy is no restart of the engine.
func TestWorkerBehindAForwardProxyIsNotMarkedDown(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodGet {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, fakeChat(""))
	}))
	defer srv.Close()
	proxy := forwardProxy(t, srv.Listener.Addr().String())
	const dial = "engine.invalid:443" // only the proxy knows it
	s := startCaddy(t, "kv_router {\nworker "+dial+" {\nmodels sim-8b\n}\nreverse_proxy "+dial+" {\ntransport http {\ntls_insecure_skip_verify\nnetwork_proxy url "+proxy.URL+"\n}\n}\n}")
	s.mustChat(t, simChat(someWords(1000)))
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if h := s.health(t, dial); h.admin == "no" {
			t.Fatalf("a worker that answers is %+v", h)
		}
	}
	proxy.Close()
	srv.CloseClientConnections() // and with them the tunnels
	if a := s.chat(t.Context(), simChat("hello")); a.ok() {
		t.Fatal("a request was answered without the proxy")
	}
	if n := s.worker(t, dial).Cache.Cached; n == 0 {
		t.Error("the cache model was cleared because the proxy refused connections")
	}
}

// accepting counts what a listener accepts.
type accepting struct {
	net.Listener
	n atomic.Int64
}

// acceptOnly listens at an address and accepts connections, as docker's proxy does while
// the engine loads. It closes them at once, or never answers.
func acceptOnly(t *testing.T, addr string, closes bool) *accepting {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", addr)
	noError(t, err)
	t.Cleanup(func() { ln.Close() })
	a := &accepting{Listener: ln}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if a.n.Add(1); closes {
				c.Close()
			} else {
				defer c.Close()
			}
		}
	}()
	return a
}

// TestWorkerThatAcceptsAndNeverAnswersIsNotAvailable has three workers. One never answers.
// Two accept connections before they answer again, one of them after an absence.
func TestWorkerThatAcceptsAndNeverAnswersIsNotAvailable(t *testing.T) {
	tells := fakeVLLM("0.20.0", func() string { return vllmRanks(1) })
	well, sudden, restarted := startFake(t, tells), startFake(t, tells), startFake(t, tells)
	silent := acceptOnly(t, "127.0.0.1:0", false).Addr().String()
	s := startCaddy(t, "kv_router "+strings.Join([]string{well.Addr(), sudden.Addr(), restarted.Addr(), silent}, " "))
	is := func(dial, want string) func() bool {
		return func() bool {
			return s.agreed(t, dial) == health{want, map[string]string{"yes": "no", "no": "yes"}[want], want}
		}
	}
	for _, f := range []*fake{well, sudden, restarted} {
		within(t, inTime, "the workers to be known", is(f.Addr(), "yes"))
	}
	sudden.stop()
	now := acceptOnly(t, sudden.Addr(), true)
	restarted.stop()
	within(t, inTime, "its absence to be known", is(restarted.Addr(), "no"))
	later := acceptOnly(t, restarted.Addr(), true)
	eventually(t, "some connections", func() bool {
		if h := s.health(t, restarted.Addr()); h.admin != "no" || h.metric != "no" {
			t.Fatalf("a worker that only accepts connections is %+v", h)
		}
		return later.n.Load() >= 4
	})
	eventually(t, "two to be marked down", func() bool { return is(sudden.Addr(), "no")() && is(silent, "no")() })
	for i := range 20 {
		if a := s.chat(t.Context(), simChat(fmt.Sprint("question ", i))); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	equal(t, well.asked("/v1/chat/completions"), 20, "requests at the worker that answers")
	now.Close()
	later.Close()
	for _, f := range []*fake{sudden, restarted} {
		f.again(t)
		within(t, inTime, "its answers to be seen", is(f.Addr(), "yes"))
	}
}
