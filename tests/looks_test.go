package tests

import (
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
		t.Error("the mirror was cleared because the proxy refused connections")
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
