package tests

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// siteOf returns what is in the last site block of a Caddyfile, with replacements.
func siteOf(t *testing.T, file, address string, replace ...string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, site, found := strings.Cut(string(text), "\n"+address+" {\n")
	site, closed := strings.CutSuffix(site, "\n}\n")
	if !found || !closed {
		t.Fatalf("%s has no site %s at its end", file, address)
	}
	return strings.NewReplacer(replace...).Replace(site)
}

type keyed struct {
	path   string // behind a method if that is not POST
	header []string
	status int
}

// TestExamplesLetClientsIn sends requests to the Caddyfiles for production, with and without a key.
func TestExamplesLetClientsIn(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	one, two := engines[0].Addr(), engines[1].Addr()
	t.Setenv("LLM_KEY_ALICE", "alice-key")
	t.Setenv("LLM_KEY_BATCH", "") // lets nobody in
	t.Setenv("KV_ROUTER_UPSTREAMS", one+" "+two)
	t.Setenv("KV_ROUTER_API_KEY", "alice-key")
	t.Setenv("KV_ROUTER_OPTIONS", "response_headers X-KV-\nmax_body 1MiB")
	t.Setenv("KV_ROUTER_PATHS", "/detokenize")
	const chats = "/v1/chat/completions"
	bearer := []string{"Authorization", "Bearer alice-key"}
	both := []keyed{
		{chats, bearer, 200},
		{chats, []string{"Authorization", "bearer alice-key"}, 200},
		{"/v1/messages", []string{"X-Api-Key", "alice-key"}, 200},
		{chats, nil, 401},
		{chats, []string{"Authorization", "Bearer other"}, 401},
		{chats, []string{"Authorization", "Bearer "}, 401},
		{chats, []string{"X-Api-Key", ""}, 401},
		{chats, []string{"X-Api-Key", "batch"}, 401},
		{"/v1/load_lora_adapter", bearer, 404},
		{"/v1/models/../load_lora_adapter", bearer, 400}, // engines get the path as it is
		{"/v1/models/..%2fload_lora_adapter", bearer, 400},
		{"/metrics/%2e%2e/health", nil, 400},
		{"/v1//chat/completions", bearer, 400},
		{"/sleep", bearer, 404},
	}
	for _, v := range []struct {
		name, site string
		requests   []keyed
	}{
		{
			"production", // first: the image lets keys through to engines
			siteOf(t, "../Caddyfile.example", "llm.example.com", "gpu-1:8000", one, "gpu-2:8000", two, " gpu-3:8000 gpu-4:8000", "", "gpu-4:8000", two),
			[]keyed{{"/detokenize", bearer, 404}},
		},
		{
			"image",
			siteOf(t, "../handler/operations/Caddyfile", ":8080"),
			[]keyed{
				{"/detokenize", bearer, 200},
				{"GET /health", nil, 200},
				{"HEAD /health", nil, 200},
				{"GET /health", []string{"Content-Encoding", "identity"}, 413}, // with a body
				{"/health", nil, 401},
				{"PUT /health", nil, 401},
				{"DELETE /health", []string{"X-Api-Key", "batch"}, 401},
				{"get /health", nil, 401},
				{"GET /HEALTH", nil, 401},
				{"GET /health/", nil, 401},
				{"GET /%68ealth", nil, 200},
				{"GET /v1/models", nil, 401},
			},
		},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := startCaddy(t, v.site)
			before := s.scrape(t)
			for _, e := range append(both, v.requests...) {
				method, path, found := strings.Cut(e.path, " ")
				if !found {
					method, path = http.MethodPost, e.path
				}
				body := `{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"Hello"}]}`
				if e.status == 200 && (method == http.MethodGet || method == http.MethodHead) {
					body = ""
				}
				a := s.request(t.Context(), method, path, strings.NewReader(body), e.header...)
				if a.status != e.status {
					t.Errorf("%s with %q: status %d, want %d: %.200s", e.path, e.header, a.status, e.status, a.body)
				}
			}
			if v.name != "production" {
				return
			}
			for _, e := range engines {
				for _, r := range e.Journal() {
					if r.Header.Get("Authorization") != "" || r.Header.Get("X-Api-Key") != "" {
						t.Errorf("an engine got a client's key with %s", r.URI)
					}
				}
			}
			log, err := os.ReadFile(s.log)
			if err != nil || strings.Count(string(log), `"user_id":"alice"`) < 3 {
				t.Errorf("the access log does not name the user: %v", err)
			}
			s.wantFigures(t, before, []figure{
				{"caddy_kv_router_user_requests_total", []string{`user="alice"`, `outcome="ok"`}, 3},
			})
		})
	}
}

// TestUsersHaveTheirOwnSessions has two users of the Caddyfile for production, who give their
// sessions one name. One ends it.
func TestUsersHaveTheirOwnSessions(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	one, two := engines[0].Addr(), engines[1].Addr()
	t.Setenv("LLM_KEY_ALICE", "alice-key")
	t.Setenv("LLM_KEY_BATCH", "batch-key")
	s := startCaddy(t, siteOf(t, "../Caddyfile.example", "llm.example.com", "gpu-1:8000", one, "gpu-2:8000", two, " gpu-3:8000 gpu-4:8000", "", "gpu-4:8000", two))
	ask := func(user, state, nvext string) {
		t.Helper()
		a := s.post(t.Context(), atChat, []byte(`{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"Hello"}],"nvext":`+nvext+`}`),
			"Authorization", "Bearer "+user+"-key", "X-Session-Id", "default")
		if got := a.header.Get("X-KV-Session-State"); a.status != http.StatusOK || got != state {
			t.Errorf("%s with %s: status %d, session %q, want %q", user, nvext, a.status, got, state)
		}
	}
	ask("alice", "new", "null")
	ask("batch", "new", "null")
	ask("batch", "final", `{"session_control":{"session_id":"default","action":"close"}}`)
	ask("alice", "bound", "null")
	for user, want := range map[string]int{"alice": http.StatusOK, "batch": http.StatusNotFound, "": http.StatusNotFound} {
		if status, text := s.api(t, http.MethodGet, "/pools/main/sessions/default?model=m&scope="+user, nil, nil); status != want {
			t.Errorf("the session of %q: status %d: %s", user, status, text)
		}
	}
}
