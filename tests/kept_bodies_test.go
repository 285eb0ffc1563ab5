package tests

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

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
