package tests

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

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
		go func() {
			io.Copy(up, c)
			up.Close()
		}()
		io.Copy(c, up)
	}))
	t.Cleanup(proxy.Close)
	return proxy
}

// TestWorkerBehindAForwardProxyIsNotMarkedDown has a worker with TLS that is
// reached only through a forward proxy. Its models are configured, so that most
// looks ask it nothing. A restart of the proxy is no restart of the engine.
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
	if n := s.fakeWorker(t, dial).Cache.Cached; n == 0 {
		t.Error("the cache model was cleared because the proxy refused connections")
	}
}

// TestLooksMakeNoFailedHandshakes has a worker with TLS that is never asked
// anything.
func TestLooksMakeNoFailedHandshakes(t *testing.T) {
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var n atomic.Int64
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			c.Close()
		}
	}()
	dial := ln.Addr().String()
	startCaddy(t, strings.ReplaceAll("kv_router {\nworker % {\nmodels m\nengine other\n}\nreverse_proxy % {\ntransport http {\ntls_insecure_skip_verify\n}\n}\n}", "%", dial))
	time.Sleep(5 * time.Second) // nothing happens meanwhile
	if n := n.Load(); n > 0 {
		t.Errorf("%d connections without a request", n)
	}
}

// acceptOnly listens at an address and accepts connections, as docker's proxy does
// while the engine loads. It closes them at once, or answers nothing.
func acceptOnly(t *testing.T, addr string, closes bool) net.Listener {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if closes {
				c.Close()
			} else {
				defer c.Close()
			}
		}
	}()
	return ln
}

// TestWorkerThatAcceptsAndNeverAnswersIsNotAvailable has three workers. One
// answers nothing from the beginning. Two accept connections before they answer
// again, one of them after an absence.
func TestWorkerThatAcceptsAndNeverAnswersIsNotAvailable(t *testing.T) {
	tells := fakeVLLM("0.20.0", func() string { return vllmRanks(1) })
	well, sudden, restarted := startFake(t, tells), startFake(t, tells), startFake(t, tells)
	silent := acceptOnly(t, "127.0.0.1:0", false).Addr().String()
	s := startCaddy(t, "kv_router "+strings.Join([]string{well.addr(), sudden.addr(), restarted.addr(), silent}, " "))
	is := func(dial, want string) func() bool {
		return func() bool {
			return s.agreed(t, dial) == health{want, map[string]string{"yes": "no", "no": "yes"}[want], want}
		}
	}
	for _, f := range []*fake{well, sudden, restarted} {
		eventually(t, inTime, "the workers to be known", is(f.addr(), "yes"))
	}
	sudden.stop()
	now := acceptOnly(t, sudden.addr(), true)
	restarted.stop()
	eventually(t, inTime, "its absence to be known", is(restarted.addr(), "no"))
	later := acceptOnly(t, restarted.addr(), true)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if h := s.health(t, restarted.addr()); h.admin != "no" || h.metric != "no" {
			t.Fatalf("a worker that only accepts connections is %+v", h)
		}
	}
	eventually(t, 10*time.Second, "two to be marked down", func() bool { return is(sudden.addr(), "no")() && is(silent, "no")() })
	for i := range 20 {
		if a := s.chat(t.Context(), simChat(fmt.Sprint("question ", i))); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	if n := well.asked("/v1/chat/completions"); n != 20 {
		t.Errorf("the worker that answers got %d of 20 requests", n)
	}
	now.Close()
	later.Close()
	for _, f := range []*fake{sudden, restarted} {
		f.again(t)
		eventually(t, inTime, "its answers to be seen", is(f.addr(), "yes"))
	}
}

// TestWorkerThatReturnsIsAskedAtOnce starts the engine after Caddy. The first
// request may come before its block size is known, the next ones may not.
func TestWorkerThatReturnsIsAskedAtOnce(t *testing.T) {
	f := startFake(t, fakeVLLM("0.20.0", func() string {
		return "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"10000\"} 1.0\n"
	}))
	f.stop()
	s := startCaddy(t, "kv_router "+f.addr())
	eventually(t, inTime, "its absence to be known", func() bool { return s.health(t, f.addr()).admin == "no" })
	f.again(t)
	body := []byte(`{"model":"sim-8b","prompt":` + idsFrom(1, 2000) + `}`)
	if a := s.post(t.Context(), "/v1/completions", body); a.status != http.StatusOK {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	eventually(t, 2*time.Second, "the block size to be known", func() bool {
		var p struct {
			Settings struct {
				BlockSize int `json:"block_size_tokens"`
			} `json:"settings"`
		}
		s.api(t, http.MethodGet, defaultPool, nil, &p)
		return p.Settings.BlockSize == 32
	})
}

// TestHandlersOfAPoolShareTheFirstLook has many handlers of one pool: each
// configuration asks a worker once when it begins to serve, not once per handler.
func TestHandlersOfAPoolShareTheFirstLook(t *testing.T) {
	f := startFake(t, fakeVLLM("0.20.0", func() string { return vllmRanks(1) }))
	var site strings.Builder
	const handlers, reloads = 20, 3
	for i := range handlers {
		fmt.Fprintf(&site, "handle_path /p%d/* {\nkv_router %s\n}\n", i, f.addr())
	}
	s := startCaddy(t, site.String())
	eventually(t, inTime, "the worker to be known", func() bool { return s.fakeWorker(t, f.addr()).Engine.Version != "" })
	for range reloads {
		if err := s.reload(site.String()); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(time.Second) // all handlers have had their first look
	// a few more are those of later looks, and of what the engine is
	if n := f.asked("/v1/models"); n > 2*(1+reloads)+4 {
		t.Errorf("asked %d times for its models by %d handlers in %d configurations", n, handlers, 1+reloads)
	}
	if n := f.asked("/metrics"); n > 2 {
		t.Errorf("asked %d times for its metrics", n)
	}
}
