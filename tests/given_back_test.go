package tests

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestGivenBackBodiesAreLetGoOf has a backup that delays reading the body that the router
// handed back. The body counts as memory until then, or until the client leaves.
func TestGivenBackBodiesAreLetGoOf(t *testing.T) {
	goOn := make(chan struct{})
	got := make(chan int64, 1)
	backup := serveRaw(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-goOn:
			if n, err := io.Copy(io.Discard, r.Body); err == nil { // else it is that of the client which left
				got <- n
			}
		case <-r.Context().Done():
		}
	})
	s := startCaddy(t, "kv_router "+freeAddr(t)+"\nhandle_errors {\nreverse_proxy "+backup+"\n}")
	body := string(ask(strings.Repeat("word ", 16<<20/5)).body())
	counted := func(t *testing.T, least int64) {
		t.Helper()
		eventually(t, 10*time.Second, "the body is counted", func() bool { return s.bodyBytes(t) >= least })
	}
	gone := func(t *testing.T) {
		t.Helper()
		eventually(t, 10*time.Second, "the body is let go of", func() bool { return s.bodyBytes(t) == 0 })
	}
	t.Run("ClientLeaves", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		q.leave()
		gone(t)
	})
	t.Run("BackupReads", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		close(goOn)
		if n := <-got; n != int64(len(body)) {
			t.Errorf("the backup got %d of %d bytes", n, len(body))
		}
		if a := q.wait(t); a.status != http.StatusOK {
			t.Errorf("status %d", a.status)
		}
		gone(t)
	})
	t.Run("NobodyReads", func(t *testing.T) {
		if err := s.reload("kv_router " + freeAddr(t) + "\nhandle_errors {\nrespond ours\n}"); err != nil {
			t.Fatal(err)
		}
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(body)); string(a.body) != "ours" {
			t.Errorf("status %d, error %v, body %q", a.status, a.err, a.body)
		}
		gone(t)
	})
}

// TestBodiesReadByTheProxyAreLetGoOf configures the proxy to read the request's
// body itself, for its buffers or for another handler. The body's memory must not
// stay in use after the request.
func TestBodiesReadByTheProxyAreLetGoOf(t *testing.T) {
	drain := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, withUsage)
	}
	eng, backup := serveRaw(t, drain), serveRaw(t, drain)
	for name, block := range map[string]string{
		"HandleResponse":      "handle_response {\nreverse_proxy " + backup + "\n}",
		"HandleResponseFails": "handle_response {\nerror 503\n}",
		"RequestBuffers":      "request_buffers 1MB",
	} {
		t.Run(name, func(t *testing.T) {
			s := startCaddy(t, "handle /v1/* {\nkv_router {\nreverse_proxy "+eng+" {\n"+block+"\n}\n}\n}\nhandle_errors {\nreverse_proxy "+backup+"\n}")
			body := ask(strings.Repeat("word ", 20000)).body()
			for range 3 {
				if a := s.post(t.Context(), "/v1/chat/completions", body); a.status != http.StatusOK {
					t.Errorf("status %d, error %v", a.status, a.err)
				}
			}
			eventually(t, 5*time.Second, "the bodies are let go of", func() bool { return s.bodyBytes(t) == 0 })
		})
	}
}

// TestUploadsAreCounted has clients stop in the middle of their bodies. These
// bytes count as memory until the clients leave.
func TestUploadsAreCounted(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "max_body 2MiB"))
	const sent = 1 << 20
	var clients []net.Conn
	for _, length := range []int{2 * sent, 4 * sent} { // the latter is streamed through
		for _, path := range []string{"/v1/chat/completions", "/tokenize"} {
			c := s.connect(t)
			clients = append(clients, c)
			fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", path, s.addr, length)
			if _, err := c.Write(make([]byte, sent)); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, 5*time.Second, "the first body to be counted", func() bool { n := s.bodyBytes(t); return n >= sent && n <= 4*sent })
	for _, c := range clients {
		c.Close()
	}
	eventually(t, 5*time.Second, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	s.booksAtZero(t)

	chunked := func(path string, size int) {
		t.Helper()
		a := s.post(t.Context(), path, []byte(strings.Repeat(" ", size)+"{}"), "Content-Type", "application/json")
		if a.err != nil {
			t.Fatal(a.err)
		}
	}
	for _, size := range []int{10, sent, 3 * sent} {
		chunked("/v1/chat/completions", size)
		chunked("/tokenize", size)
	}
	eventually(t, 5*time.Second, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
}
