package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestPoolLinesFollowTheLogs directs the router's lines to a log of their own, over a reload.
func TestPoolLinesFollowTheLogs(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	file := filepath.Join(t.TempDir(), "router.log")
	s := startCaddy(t, route(engines), fmt.Sprintf("log router {\noutput file %s\ninclude http.handlers.kv_router\n}", file))
	for i, e := range engines {
		if i > 0 {
			if err := s.reload(route(engines, "policy round_robin")); err != nil {
				t.Fatal(err)
			}
		}
		e.Kill()
		eventually(t, 5*time.Second, "the pool's line", func() bool {
			s.chat(t.Context(), ask("hello"))
			data, _ := os.ReadFile(file)
			return bytes.Contains(data, []byte(`"worker is marked down"`)) && bytes.Contains(data, []byte(e.Addr()))
		})
	}
}

// TestNobodyAnswers sends requests of all kinds to a pool without a living worker.
func TestNobodyAnswers(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	backup := startEngines(t, 1, canned.Pace{})[0]
	for _, e := range engines {
		e.Kill()
	}
	for _, path := range []string{"/v1/chat/completions", "/tokenize", "/x"} {
		a := s.post(t.Context(), path, ask("hello").body())
		if a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" || !strings.Contains(string(a.body), `"code":"no_worker"`) {
			t.Errorf("%s: status %d, header %v, body %q", path, a.status, a.header, a.body)
		}
	}
	if err := s.reload(fmt.Sprintf("handle_errors {\nreverse_proxy %s\n}\n%s", backup.Addr(), route(engines))); err != nil {
		t.Fatal(err)
	}
	if a := s.chat(t.Context(), ask("hello")); a.status != http.StatusOK || a.header.Get("Retry-After") != "" {
		t.Errorf("the backup's answer has status %d, header %v", a.status, a.header)
	}
}

// TestRefusedRequestsAreLogged looks for refusals in the access log.
func TestRefusedRequestsAreLogged(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	file := filepath.Join(t.TempDir(), "access.log")
	s := startCaddy(t, fmt.Sprintf("log {\noutput file %s\nformat json\n}\n", file)+route(engines, "trust pins"))
	c := ask("hello")
	for _, nvext := range []string{`{"backend_instance_id":77}`, `5`} {
		c.Nvext = []byte(nvext)
		if a := s.chat(t.Context(), c); a.status != http.StatusBadRequest {
			t.Fatalf("nvext %s: status %d, body %q", nvext, a.status, a.body)
		}
	}
	eventually(t, 2*time.Second, "both refusals in the access log", func() bool {
		data, _ := os.ReadFile(file)
		return bytes.Count(data, []byte(`"kv_router":{"outcome":"rejected"`)) == 2
	})
}

// TestWhatIsNotForTheRouterPasses sends what only looks like a wish.
func TestWhatIsNotForTheRouterPasses(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	body := []byte(`{"nvext":5}`)
	for _, path := range []string{"/x", "/tokenize"} {
		if a := s.post(t.Context(), path, body); a.status == http.StatusBadRequest {
			t.Errorf("%s: status %d, body %q", path, a.status, a.body)
		}
	}
	c := ask("hello")
	long, _ := json.Marshal(map[string]any{"model": c.Model, "messages": c.Messages, "prompt_cache_key": strings.Repeat("k", 3000)})
	first := s.post(t.Context(), "/v1/chat/completions", long)
	for range 4 {
		if a := s.post(t.Context(), "/v1/chat/completions", long); a.status != http.StatusOK || a.engine() != first.engine() {
			t.Errorf("a long session key: status %d by %s, first %s", a.status, a.engine(), first.engine())
		}
	}
}
