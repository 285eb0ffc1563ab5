package body

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// uploadServer reads bodies into m, as Caddy's server with its read_idle_timeout
// does, and answers with 408 if that fails, else with 200.
func uploadServer(t *testing.T, m *Memory, http2 bool) *httptest.Server {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := &caddyhttp.IdleTimeoutReader{
			ReadCloser: r.Body, Ctrl: http.NewResponseController(w), Logger: zap.NewNop(),
			Deadline:      caddyhttp.IdleDeadline{Start: time.Now(), Timeout: time.Minute},
			DrainDeadline: r.ProtoMajor == 1, ClearBetweenReads: r.ProtoMajor == 2,
		}
		defer body.HandlerDone()
		r.Body = body
		all, _, err := m.Read(r.WithContext(caddyhttp.ContextWithIdleTimeouts(r.Context(), body, nil)), 1<<20)
		if err != nil {
			w.WriteHeader(http.StatusRequestTimeout)
			return
		}
		all.free()
	}))
	srv.EnableHTTP2 = http2
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv
}

// until waits until cond holds.
func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 5 s: " + what)
		}
	}
}

// bytesReceived returns how many bytes of the listed uploads have arrived.
func (m *Memory) bytesReceived() (n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for up := range m.uploads {
		n += up.received.Load()
	}
	return n
}

// TestSlowUploadsEndOnlyIfMemoryIsShort has an upload stall and go on, with and
// without enough memory.
func TestSlowUploadsEndOnlyIfMemoryIsShort(t *testing.T) {
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(proto, func(t *testing.T) {
			var m Memory
			srv := uploadServer(t, &m, proto == "HTTP/2.0")
			for _, v := range []struct {
				name         string
				more         int // bytes before the last look
				short        bool
				ended        int
				statusWanted int
			}{
				{"stalled, memory enough", 0, false, 0, http.StatusOK},
				{"goes on, memory short", leastReceived, true, 0, http.StatusOK},
				{"stalled, memory short", 0, true, 1, http.StatusRequestTimeout},
				{"slow, memory short", leastReceived - 1, true, 1, http.StatusRequestTimeout},
			} {
				in, out := io.Pipe()
				const size, first = 200_000, 50_000
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL, in)
				req.ContentLength = size
				answers := make(chan *http.Response, 1)
				go func() {
					resp, err := srv.Client().Do(req)
					if err != nil {
						t.Errorf("%s: %v", v.name, err)
					}
					answers <- resp
				}()
				out.Write(make([]byte, first))
				until(t, "the first bytes", func() bool { return m.bytesReceived() == first })
				if n := m.endSlow(true); n != 0 {
					t.Errorf("%s: ended at the first look", v.name)
				}
				out.Write(make([]byte, v.more))
				until(t, "more bytes", func() bool { return m.bytesReceived() == first+int64(v.more) })
				if n := m.endSlow(v.short); n != v.ended {
					t.Errorf("%s: %d uploads ended, want %d", v.name, n, v.ended)
				}
				if v.ended == 0 {
					out.Write(make([]byte, size-first-v.more))
					out.Close()
				}
				resp := <-answers
				out.CloseWithError(io.ErrClosedPipe)
				if resp == nil {
					continue
				}
				resp.Body.Close()
				if resp.StatusCode != v.statusWanted || resp.Proto != proto {
					t.Errorf("%s: %s %d, want %d", v.name, resp.Proto, resp.StatusCode, v.statusWanted)
				}
				until(t, "the list to be empty", func() bool { m.mu.Lock(); defer m.mu.Unlock(); return len(m.uploads) == 0 })
				until(t, "the memory to be given back", func() bool { return m.Held.Load() == 0 })
			}
		})
	}
}
