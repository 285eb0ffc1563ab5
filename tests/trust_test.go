package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

const (
	nvextDropped   = "caddy_kv_router_nvext_dropped_total"
	nvextMalformed = "caddy_kv_router_nvext_malformed_headers_total"
)

// trusted is the header of clients that the tests' configurations trust.
var trusted = []string{"X-Role", "router"}

// trust returns a trust option that gives grants to clients with that header.
func trust(what string) string {
	return "trust " + what + " {\nheader X-Role router\n}"
}

// numbered gives the engines the ids 1, 2 and so on.
func numbered(engines []*canned.Engine, more ...string) string {
	var b strings.Builder
	for i, e := range engines {
		fmt.Fprintf(&b, "worker %s {\nid %d\n", e.Addr(), i+1)
		if i < len(more) {
			b.WriteString(more[i] + "\n")
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// wishing returns a chat with an nvext.
func wishing(content, nvext string) chat {
	c := ask(content)
	c.Nvext = json.RawMessage(nvext)
	return c
}

// errorOf returns the code and the message of a refusal.
func errorOf(a answer) (code, message string) {
	var doc struct {
		Error struct{ Code, Message string }
	}
	_ = json.Unmarshal(a.body, &doc)
	return doc.Error.Code, doc.Error.Message
}

// wantError checks a refusal.
func wantError(t testing.TB, what string, a answer, status int, code string, in ...string) {
	t.Helper()
	got, message := errorOf(a)
	if a.status != status || got != code {
		t.Errorf("%s: status %d, code %q, body %.300q; want %d %s", what, a.status, got, a.body, status, code)
		return
	}
	for _, part := range in {
		if !strings.Contains(message, part) {
			t.Errorf("%s: the message %q has no %q", what, message, part)
		}
	}
}

// routingHeaders are all headers that steer a router.
var routingHeaders = []string{
	"X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id", "X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id",
	"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank", "X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank",
	"X-Dynamo-Request-Priority", "X-Dynamo-Request-Strict-Priority", "X-Tenant-Id",
}

// TestGrants sends each kind of wish from a client with the grant and from one without.
// Without it the router counts the wish and drops it before the engine.
func TestGrants(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	prompt := strings.Repeat("a prompt that is long enough for several blocks ", 20)
	for _, v := range []struct {
		grant, nvext string
		header       []string
		// honoured tells of an answer whether the wish was.
		honoured func(s *server, a answer) bool
	}{
		{"pins", `{"backend_instance_id":2}`, nil, func(_ *server, a answer) bool {
			return a.engine() == "e2" && a.header.Get("X-KV-Reason") == "pin"
		}},
		{"pins", `{"decode_worker_id":3,"dp_rank":0}`, nil, func(_ *server, a answer) bool { return a.header.Get("X-KV-Reason") == "pin" }},
		{"pins", `{}`, []string{"X-Worker-Instance-Id", "2"}, func(_ *server, a answer) bool { return a.header.Get("X-KV-Reason") == "pin" }},
		{"pins", `{"backend_instance_id":99}`, nil, func(_ *server, a answer) bool { return a.status == 400 }},
		{"overrides", `{"allowed_worker_ids":[]}`, nil, func(_ *server, a answer) bool { return a.status == 503 }},
		{"overrides", `{"routing_constraints":{"required_taints":["gold"]}}`, nil, func(_ *server, a answer) bool { return a.status == 503 }},
		{"explain", `{"annotations":["query_instance_id"]}`, nil, func(_ *server, a answer) bool { return strings.Contains(string(a.body), "worker_id") }},
		{"tenants", `{}`, []string{"X-Tenant-Id", "new"}, func(_ *server, a answer) bool { return a.header.Get("X-KV-Overlap-Blocks") == "0" }},
	} {
		t.Run(v.grant, func(t *testing.T) {
			s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-", trust(v.grant)))
			s.mustChat(t, ask(prompt))
			before := s.scrape(t)
			if a := s.chat(t.Context(), wishing(prompt, v.nvext), append(v.header, trusted...)...); !v.honoured(s, a) {
				t.Errorf("%s of a client that is trusted: status %d, header %v, body %.300q", v.nvext, a.status, a.header, a.body)
			}
			if n := s.scrape(t).value(nvextDropped) - before.value(nvextDropped); n != 0 {
				t.Errorf("%v wishes of the trusted client were dropped", n)
			}
			a := s.mustChat(t, wishing(prompt, v.nvext), v.header...)
			if v.honoured(s, a) && !strings.HasPrefix(v.nvext, `{"decode`) || a.header.Get("X-KV-Reason") == "pin" {
				t.Errorf("%s of a client that is not trusted was honoured: header %v", v.nvext, a.header)
			}
			for _, e := range engines {
				for _, r := range e.Journal() {
					for _, name := range routingHeaders {
						if name != "X-Tenant-Id" && r.Header.Get(name) != "" || r.Header.Get("X-Role") == "" && r.Header.Get(name) != "" {
							t.Errorf("the engine was sent %s: %q", name, r.Header.Get(name))
						}
					}
				}
			}
			after := s.scrape(t)
			for _, name := range []string{"pins", "priorities", "overrides", "tenants", "uploads", "explain"} {
				want := 0.0
				if name == v.grant {
					want = 1
				}
				label := `grant="` + name + `"`
				if n := after.value(nvextDropped, label) - before.value(nvextDropped, label); n != want {
					t.Errorf("%v dropped of %s, want %v", n, name, want)
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestTrustLinesAddUp has one grant for all clients, one for some, and matchers that
// cannot match.
func TestTrustLinesAddUp(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-",
		"trust explain", trust("pins"), "trust overrides {\nclient_ip 203.0.113.1\n}"))
	pinned := wishing("hello", `{"backend_instance_id":2,"allowed_worker_ids":[1],"annotations":["query_instance_id"]}`)
	if a := s.mustChat(t, pinned); a.engine() != "" || !strings.Contains(string(a.body), "worker_id") {
		t.Errorf("explain, which everybody is trusted with: header %v, body %.200q", a.header, a.body)
	}
	if a := s.mustChat(t, pinned, trusted...); !strings.Contains(string(a.body), `"decode_worker_id":2`) {
		t.Errorf("with pins, too, and without overrides: body %.300q", a.body)
	}
}

// TestMalformedHeadersLeaveTheBody sends malformed routing headers. The body's nvext
// applies, and the router counts the headers.
func TestMalformedHeadersLeaveTheBody(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "trust pins"))
	before := s.scrape(t)
	for range 4 {
		a := s.mustChat(t, wishing("hello", `{"backend_instance_id":2}`), "X-Worker-Instance-Id", "first", "X-Dp-Rank", "4294967295")
		if a.engine() != "e2" {
			t.Errorf("answered by %s", a.engine())
		}
	}
	if n := s.scrape(t).value(nvextMalformed, `header="X-Worker-Instance-Id"`) - before.value(nvextMalformed, `header="X-Worker-Instance-Id"`); n != 4 {
		t.Errorf("%v malformed headers counted, want 4", n)
	}
	for _, r := range engines[1].Journal() {
		for _, name := range routingHeaders {
			if r.Header.Get(name) != "" {
				t.Errorf("the engine was sent %s", name)
			}
		}
	}
}

// TestWrongNvextIsRefused sends nvext that is a 400 for every client.
func TestWrongNvextIsRefused(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	for _, v := range []struct{ block, nvext, field string }{
		{"", `{"backend_instance_id":"2"}`, "nvext.backend_instance_id"},
		{"", `{"dp_rank":1.5}`, "nvext.dp_rank"},
		{"", `{"backend_instance_id":-1}`, "nvext.backend_instance_id"},
		{"", `{"metadata_upload":{"url":" "}}`, "nvext.metadata_upload.url"},
		{"", `{"agent_hints":{"priority":"high"}}`, "nvext.agent_hints.priority"},
		{"", `{"agent_hints":[]}`, "nvext.agent_hints"},
		{"strict_nvext", `{"backend_instance":2}`, "nvext.backend_instance"},
		{"strict_nvext", `{"agent_hints":{"mood":1}}`, "nvext.agent_hints.mood"},
		{"trust explain", `{"extra_fields":["completion_token_ids"]}`, "exactly one"},
	} {
		s := startCaddy(t, route(engines, v.block))
		c := []byte(`{"model":"m","n":2,"messages":[],"nvext":` + v.nvext + `}`)
		wantError(t, v.nvext, s.post(t.Context(), "/v1/chat/completions", c), 400, "invalid_nvext", v.field)
	}
	if n := engines[0].Requests(); n != 0 {
		t.Errorf("the engine was sent %d requests", n)
	}
	s := startCaddy(t, route(engines))
	s.mustChat(t, wishing("hi", `{"unknown":1,"agent_hints":{"mood":1}}`))
}

// TestSpoofedHeadersDoNotPass sends routing headers on requests whose body the router does
// not read, and on requests that are not inference requests.
func TestSpoofedHeadersDoNotPass(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	for _, v := range []struct {
		block string
		pass  []string
	}{
		{"pool default", nil},
		{"trust pins priorities tenants", []string{"X-Dynamo-Request-Priority", "X-Dynamo-Request-Strict-Priority", "X-Tenant-Id"}},
	} {
		s := startCaddy(t, route(engines, numbered(engines), "max_body 1KiB", v.block))
		body := string(ask("hello").body())
		for _, r := range []struct{ method, path, body, coding string }{
			{"GET", "/v1/models", "", ""},
			{"POST", "/tokenize", body, ""},
			{"POST", "/v1/audio/speech", `{"input":"x"}`, ""},
			{"POST", "/v1/chat/completions", body, ""},
			{"POST", "/v1/chat/completions", gzipped(body), "gzip"},
			{"POST", "/v1/chat/completions", string(ask(strings.Repeat("long ", 1000)).body()), ""},
			{"POST", "/v1/chat/completions", `{"model":`, ""},
		} {
			before := engines[0].Requests()
			req, err := http.NewRequestWithContext(t.Context(), r.method, s.url+r.path, strings.NewReader(r.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			if r.coding != "" {
				req.Header.Set("Content-Encoding", r.coding)
			}
			for _, name := range routingHeaders {
				req.Header.Set(name, "1")
				if strings.Contains(name, "Rank") {
					req.Header.Set(name, "0")
				}
				if strings.Contains(name, "Prefill") {
					req.Header.Set(name, "4294967295x") // one that is granted would be a 400
				}
			}
			resp, err := s.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			journal := engines[0].Journal()[before:]
			unread := r.coding != "" || len(r.body) > 1024 || r.body == `{"model":`
			if unread && strings.Contains(v.block, "tenants") {
				if len(journal) != 0 || resp.StatusCode < 400 {
					t.Errorf("a tenant's body that was not read: status %d", resp.StatusCode)
				}
				continue
			}
			if len(journal) != 1 {
				t.Errorf("%s %s: status %d, the engine was sent %d requests", r.method, r.path, resp.StatusCode, len(journal))
				continue
			}
			var got []string
			for _, name := range routingHeaders {
				if journal[0].Header.Get(name) != "" {
					got = append(got, name)
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(v.pass) {
				t.Errorf("%s: %s %s: the engine was sent %v, want %v", v.block, r.method, r.path, got, v.pass)
			}
		}
	}
}

// TestTenantsShareNothing sends one prompt and one session key of two tenants, which are
// named by header, by nvext, and by the body's salt.
func TestTenantsShareNothing(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{}) // which the policy cannot spread the prompt from
	prompt := strings.Repeat("the same prompt of everybody, some blocks long ", 20)
	body := func(salts string) []byte {
		return []byte(`{"model":"m",` + salts + `"messages":[{"role":"user","content":"` + prompt + `"}]}`)
	}
	s := startCaddy(t, route(engines, "response_headers X-KV-", "trust tenants"))
	for i, v := range []struct {
		salts  string
		header []string
		warm   bool
	}{
		{"", nil, false},
		{"", nil, true},
		{"", []string{"X-Tenant-Id", "a"}, false},
		{"", []string{"X-Tenant-Id", "b"}, false},
		{"", []string{"X-Tenant-Id", "a"}, true},
		{`"nvext":{"cache_salt":"a"},`, nil, true}, // it is the same salt
		{`"cache_salt":"a",`, nil, true},
		{`"nvext":{"cache_salt":"c"},`, nil, false},
		{`"cache_salt":"c","nvext":{"cache_salt":"d"},`, []string{"X-Tenant-Id", "b"}, true},
		{`"cache_salt":"d","nvext":{"cache_salt":"c"},`, nil, true},
	} {
		a := s.post(t.Context(), "/v1/chat/completions", body(v.salts), v.header...)
		if warm := a.header.Get("X-KV-Overlap-Blocks") != "0"; !a.ok() || warm != v.warm {
			t.Errorf("request %d: status %d, overlap %s, want warm %v", i, a.status, a.header.Get("X-KV-Overlap-Blocks"), v.warm)
		}
	}
	for _, tenant := range []string{"", "a", "b"} {
		header := []string{"X-Session-Id", "mine"}
		if tenant != "" {
			header = append(header, "X-Tenant-Id", tenant)
		}
		s.mustChat(t, ask("hello"), header...)
		var session adminSession
		s.api(t, "GET", defaultPool+"/sessions/mine?tenant="+tenant, nil, &session)
		if !session.Bound {
			t.Errorf("tenant %q: the session is not bound", tenant)
		}
	}
	if n := s.pool(t).Sessions; n != 3 {
		t.Errorf("%d sessions, want 3", n)
	}
	// A key that is written as a tenant's is kept is nobody's but the client's.
	s.mustChat(t, wishing("hello", `{"session_control":{"session_id":"\u0000t1:amine"}}`))
	s.mustChat(t, wishing("hello", `{"session_params":{"id":"mine"}}`))
	if n := s.pool(t).Sessions; n != 4 {
		t.Errorf("%d sessions, want 4", n)
	}
	eventually(t, 5*time.Second, "the end", func() bool { return s.pool(t).Leases == 0 })
}
