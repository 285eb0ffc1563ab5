package tests

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// sendBy makes a request of any method.
func (s *server) sendBy(t *testing.T, method, path, body string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return s.do(req)
}

// TestEveryMethodIsHeldToTheSame has requests that SGLang accepts by PUT and GET, too. The
// router reads them as it reads a POST.
func TestEveryMethodIsHeldToTheSame(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "sglang", "priority on"), "trust tenants", "response_headers X-KV-"))
	sum := sha256.Sum256([]byte("mine"))
	scoped := `"` + hex.EncodeToString(sum[:16]) + `:s"`
	const wishes = `"cache_salt":"victim","priority":99,"routed_dp_rank":1,"session_params":{"id":"s"},"session_id":"s"`
	for _, v := range []struct{ method, path string }{
		{"POST", "/generate"},
		{"PUT", "/generate"},
		{"PUT", "/v1/rerank"},
		{"PUT", "/encode"},
		{"PUT", "/invocations"},
		{"GET", "/close_session"},
		{"GET", "/open_session"},
		{"DELETE", "/close_session"},
		{"PATCH", "/v1/anything"},
		{"GET", "/generate"},
	} {
		received := len(e.Journal())
		s.sendBy(t, v.method, v.path, `{"text":"x",`+wishes+`}`, "X-Tenant-Id", "mine")
		if len(e.Journal()) == received {
			t.Errorf("%s %s did not reach the engine", v.method, v.path)
			continue
		}
		got := lastOf(e)
		body := string(got.Body)
		if got.Method != v.method || strings.Contains(body, "victim") || strings.Contains(body, "99") || strings.Contains(body, "routed_dp_rank") ||
			strings.Count(body, scoped) != 2 {
			t.Errorf("%s %s: the engine got %s %s", v.method, v.path, got.Method, body)
		}
	}
	if a := s.sendBy(t, "PUT", "/generate", `{"text":"`+strings.Repeat("a prompt of some blocks ", 20)+`"}`); a.header.Get("X-KV-Predicted-Cached-Tokens") == "" {
		t.Errorf("a PUT has no plan: header %v", a.header)
	}
	s.booksAtZero(t)

	s = startCaddy(t, route([]*canned.Engine{e}, typed(e, "sglang"), "require_pin"))
	for _, path := range []string{"/generate", "/encode"} {
		wantError(t, "PUT "+path, s.sendBy(t, "PUT", path, `{"text":"x"}`), 400, "invalid_pin", "Worker ID required")
	}
	s = startCaddy(t, route([]*canned.Engine{e}, typed(e, "llamacpp"), "enforce_cache_salt"))
	for _, path := range []string{"/generate", "/encode"} {
		wantError(t, "PUT "+path, s.sendBy(t, "PUT", path, `{"text":"x","cache_salt":"s"}`), 400, "cache_salt_unsupported")
	}
	// what has no body is what it was
	if a := s.sendBy(t, "GET", "/v1/chat/completions", ""); a.engine() != "e1" {
		t.Errorf("a GET without a body: status %d", a.status)
	}
}
