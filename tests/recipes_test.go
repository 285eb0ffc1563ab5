package tests

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/dunglas/httpsfv"
)

// recipe returns the directives in the n-th Caddyfile below a heading of docs/recipes.md, with other addresses.
func recipe(t *testing.T, heading string, n int, addresses ...string) string {
	t.Helper()
	page, err := os.ReadFile("../docs/recipes.md")
	noError(t, err)
	_, text, _ := strings.Cut(string(page), "\n## "+heading+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	blocks := regexp.MustCompile("(?s)```caddyfile\n:8080 {\n(.*?)\n}\n```").FindAllStringSubmatch(text, -1)
	if len(blocks) <= n {
		t.Fatalf("%q has %d Caddyfiles", heading, len(blocks))
	}
	return strings.NewReplacer(addresses...).Replace(blocks[n][1])
}

// TestRecipes runs the Caddyfiles of docs/recipes.md.
func TestRecipes(t *testing.T) {
	dead := freeAddr(t)
	t.Run("SecondPool", func(t *testing.T) {
		second := startEngines(t, 1, canned.Pace{})[0]
		s := startCaddy(t, recipe(t, "A second pool", 0, "gpu-1:8000", dead, "gpu-2:8000", dead, "gpu-3:8000", second.Addr()))
		for _, c := range []chat{ask("plain"), ask("streamed").streamed()} {
			s.mustChat(t, c)
		}
	})
	t.Run("HandleResponse", func(t *testing.T) {
		e := startEngines(t, 1, canned.Pace{})[0]
		e.FailNext(1, canned.Fault{Kind: canned.Status, Status: 500, Body: "Traceback"})
		s := startCaddy(t, recipe(t, "Answers of your own in place of an engine's", 0, "gpu-1:8000", e.Addr(), " gpu-2:8000", ""))
		if a := s.chat(t.Context(), ask("fails")); a.status != 500 || !strings.Contains(string(a.body), "the model failed") {
			t.Errorf("status %d, %q", a.status, a.body)
		}
		s.mustChat(t, ask("goes well"))
	})
	t.Run("Browsers", func(t *testing.T) {
		engine := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Access-Control-Allow-Origin", "*")
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, withUsage)
		})
		for status, addr := range map[int]string{200: engine, 503: dead} {
			s := startCaddy(t, recipe(t, "Browsers on other origins", 0, "gpu-1:8000", addr, " gpu-2:8000", ""))
			for method, want := range map[string]int{http.MethodOptions: 204, http.MethodPost: status} {
				a := s.request(t.Context(), method, "/v1/chat/completions", strings.NewReader(string(ask("hello").body())), "Origin", "https://app.example.com")
				if allowed := a.header["Access-Control-Allow-Origin"]; a.status != want || len(allowed) != 1 || allowed[0] != "https://app.example.com" {
					t.Errorf("%s: status %d, want %d; allowed %q", method, a.status, want, allowed)
				}
			}
		}
	})
}

// TestRecipeOfRealtime talks over a WebSocket while the configuration is reloaded.
func TestRecipeOfRealtime(t *testing.T) {
	engine := serveRaw(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for line, err := rw.ReadString('\n'); err == nil; line, err = rw.ReadString('\n') {
			io.WriteString(conn, "echo "+line)
		}
	})
	site := recipe(t, "Realtime over WebSocket", 0, "gpu-1:8000", engine, " gpu-2:8000", "")
	s := startCaddy(t, site)
	conn := s.connect(t)
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "GET /v1/realtime?model=m HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", s.addr)
	in := bufio.NewReader(conn)
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, error %v", resp, err)
	}
	for _, word := range []string{"before\n", "after\n"} {
		io.WriteString(conn, word)
		if line, err := in.ReadString('\n'); line != "echo "+word {
			t.Errorf("got %q, error %v", line, err)
		}
		s.mustReload(t, site)
	}
}

// TestRecipeOfTokens has a service check tokens, and clients that claim what they are not.
func TestRecipeOfTokens(t *testing.T) {
	auth := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("Authorization") {
		case "Bearer gold":
			w.Header().Set("X-Plan", "gold")
			fallthrough
		case "Bearer basic":
			w.Header().Set("X-Tenant", "acme")
		default:
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, "log\nlog_append tenant {http.kv_router.tenant}\nlog_append priority {http.kv_router.priority}\nhandle /v1/* {\n"+
		recipe(t, "Tenants and trust from a token", 0, "auth:9000", auth, "gpu-1:8000", e.Addr(), " gpu-2:8000", "")+"\n}")
	c := ask("hello")
	c.Nvext = []byte(`{"agent_hints":{"priority":7}}`)
	for token, priority := range map[string]string{"gold": "7", "basic": "0"} {
		a := s.chat(t.Context(), c, "Authorization", "Bearer "+token, "X-Tenant", "other", "X-Plan", "gold")
		if !a.ok() {
			t.Errorf("%s: status %d, %.200s", token, a.status, a.body)
		}
		said := `"priority":` + priority + `,"tenant":"acme"`
		eventually(t, said+" in the access log", func() bool { return s.logged(t, said) == 1 })
	}
	if a := s.chat(t.Context(), c, "Authorization", "Bearer none", "X-Tenant", "acme"); a.status != http.StatusUnauthorized {
		t.Errorf("without a token: status %d", a.status)
	}
}

// timings are members of a Server-Timing field, as the W3C's grammar has them.
var timings = regexp.MustCompile(`^queue;dur=\d+\.\d, route;dur=\d+\.\d, engine;dur=\d+\.\d$`)

// TestHeadersForTools parses the headers that tools read.
func TestHeadersForTools(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, "server_timing", "cache_status"))
	long := ask(strings.Repeat("the same prompt ", 100))
	var tokens [2]int64
	for i := range tokens {
		a := s.mustChat(t, long)
		if got := a.header.Get("Server-Timing"); !timings.MatchString(got) {
			t.Errorf("Server-Timing: %q", got)
		}
		list, err := httpsfv.UnmarshalList(a.header.Values("Cache-Status"))
		if err != nil || len(list) != 1 {
			t.Fatalf("Cache-Status: %q, error %v", a.header.Values("Cache-Status"), err)
		}
		own, _ := list[0].(httpsfv.Item)
		fwd, _ := own.Params.Get("fwd")
		hit, _ := own.Params.Get("hit")
		cached, _ := own.Params.Get("kv-cached-tokens")
		tokens[i], _ = cached.(int64)
		if own.Value != httpsfv.Token("kv_router") || (i == 0) != (fwd == httpsfv.Token("miss")) || (i == 1) != (hit == true) || (tokens[i] > 0) != (i == 1) {
			t.Errorf("request %d: Cache-Status: %q", i, a.header.Values("Cache-Status"))
		}
	}
	resp := s.mustOpen(t.Context(), t, atChat, long.streamed().body())
	read(resp)
	if got := resp.Trailer.Get("Server-Timing"); !regexp.MustCompile(`^ttft;dur=\d+\.\d$`).MatchString(got) {
		t.Errorf("the trailer is %q", got)
	}
	if a := s.request(t.Context(), http.MethodGet, "/v1/models", nil); a.header.Get("Cache-Status") != "kv_router;fwd=bypass" {
		t.Errorf("Cache-Status of a list: %q", a.header.Values("Cache-Status"))
	}
	for name, values := range s.mustChat(t, long).header {
		if strings.Contains(strings.Join(values, ""), e.Addr()) {
			t.Errorf("the header %s names the worker: %q", name, values)
		}
	}
}

// siteOf returns what is in the last site block of a Caddyfile, with replacements.
func siteOf(t *testing.T, file, address string, replace ...string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	noError(t, err)
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
	one := startEngines(t, 1, canned.Pace{})[0].Addr() // from which no session moves
	t.Setenv("LLM_KEY_ALICE", "alice-key")
	t.Setenv("LLM_KEY_BATCH", "batch-key")
	s := startCaddy(t, siteOf(t, "../Caddyfile.example", "llm.example.com", "gpu-1:8000", one, " gpu-2:8000 gpu-3:8000 gpu-4:8000", "", "gpu-4:8000", one))
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
