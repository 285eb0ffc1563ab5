package plan

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// sessionRules returns rules with these sources.
func sessionRules(t testing.TB, keys ...string) *Sessions {
	t.Helper()
	secret := affinity.NewSecret()
	s := &Sessions{Secret: func() *affinity.Secret { return &secret }}
	for _, key := range keys {
		source, err := ParseKeySource(key)
		if err != nil {
			t.Fatal(err)
		}
		s.Keys = append(s.Keys, source)
	}
	return s
}

// asked is a request with headers, as lines, a body and its nvext.
type asked struct {
	path, target, headers, body, nvext string
}

// read returns the parts of the request that name its session.
func (a asked) read(t testing.TB) (*http.Request, *api.Request, *nvext.Ext) {
	t.Helper()
	path := a.path
	if path == "" {
		path = "/v1/chat/completions"
	}
	if a.target == "" {
		a.target = path
	}
	r := httptest.NewRequest(http.MethodPost, a.target, http.NoBody)
	for line := range strings.Lines(a.headers) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		r.Header.Add(name, value)
	}
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), new(caddyhttp.Server))
	if a.body == "" {
		a.body = "{}"
	}
	req, err := api.Parse(api.For(path), []byte(a.body), api.Options{TextBlock: 64, BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	detach(req)
	ext := NoExt
	if a.nvext != "" {
		if ext, err = nvext.Parse([]byte(a.nvext), time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	return r, req, &ext
}

func (s *Sessions) of(t testing.TB, a asked) (Session, error) {
	t.Helper()
	r, req, ext := a.read(t)
	return s.find(r, req, ext)
}

// named returns the hash of a client's key without a tenant.
func (s *Sessions) named(key string) affinity.Key {
	return s.Secret().Session(s.Secret().Identity(key), affinity.Tenant{}, "")
}

// TestKeysOfClients has a request of each client in the manual's table.
func TestKeysOfClients(t *testing.T) {
	s := sessionRules(t, DefaultKeys...)
	for _, v := range []struct {
		name        string
		ask         asked
		source      string
		key, parent string
	}{
		{"session_control", asked{nvext: `{"session_control":{"session_id":" a "}}`, headers: "X-Dynamo-Session-Id: b"}, "nvext", "a", ""},
		{"session_params", asked{nvext: `{"session_params":{"id":"a"}}`}, "nvext", "a", ""},
		{"Dynamo", asked{headers: "X-Dynamo-Session-Id: a\nX-Dynamo-Parent-Session-Id: p\nX-Session-Id: b"}, "header:X-Dynamo-Session-Id", "a", "p"},
		{"Dynamo, its own parent", asked{headers: "X-Dynamo-Session-Id: a\nX-Dynamo-Parent-Session-Id: a"}, "header:X-Dynamo-Session-Id", "a", ""},
		{"Claude Code", asked{headers: "X-Claude-Code-Session-Id: a\nX-Claude-Code-Parent-Agent-Id: p"}, "header:X-Claude-Code-Session-Id", "a", ""},
		{"Claude Code, sub-agent", asked{headers: "X-Claude-Code-Session-Id: a\nX-Claude-Code-Agent-Id: 1"}, "header:X-Claude-Code-Session-Id", "a/1", "a"},
		{"Claude Code, its sub-agent", asked{headers: "X-Claude-Code-Session-Id: a\nX-Claude-Code-Agent-Id: 2\nX-Claude-Code-Parent-Agent-Id: 1"}, "header:X-Claude-Code-Session-Id", "a/2", "a/1"},
		{"Claude Code, body", asked{path: "/v1/messages", body: `{"messages":[],"metadata":{"user_id":"user_x_account_y_session_a"}}`}, "body:metadata.user_id", "a", ""},
		{"user without session", asked{path: "/v1/messages", body: `{"messages":[],"metadata":{"user_id":"alice"}}`}, "", "", ""},
		{"Codex", asked{headers: "Thread-Id: a\nX-Codex-Parent-Thread-Id: p", body: `{"prompt_cache_key":"b"}`}, "header:Thread-Id", "a", "p"},
		{"Codex, body", asked{path: "/v1/responses", body: `{"prompt_cache_key":" a "}`}, "body:prompt_cache_key", "a", ""},
		{"DeepSeek", asked{headers: "X-DeepSeek-Harness-Session-Id: a\nX-DeepSeek-Harness-Parent-Session-Id: p"}, "header:X-Deepseek-Harness-Session-Id", "a", "p"},
		{"OpenCode", asked{headers: "X-Session-Id: a\nX-Parent-Session-Id: p"}, "header:X-Session-Id", "a", "p"},
		{"conversation", asked{path: "/v1/responses", body: `{"conversation":"a"}`}, "body:conversation", "a", ""},
		{"conversation object", asked{path: "/v1/responses", body: `{"conversation":{"id":"a"}}`}, "body:conversation", "a", ""},
		{"session_id", asked{body: `{"session_id":"a"}`}, "", "", ""},
		{"request ids", asked{headers: "X-Request-Id: a\nTraceparent: b", body: `{"user":"u","request_id":"r"}`}, "", "", ""},
		{"of a router before", asked{headers: "X-Session-Id: kvr-1", body: `{"prompt_cache_key":"a"}`}, "body:prompt_cache_key", "a", ""},
		{"empty header", asked{headers: "X-Session-Id:  ", body: `{"prompt_cache_key":"a"}`}, "body:prompt_cache_key", "a", ""},
	} {
		got, err := s.of(t, v.ask)
		if err != nil {
			t.Errorf("%s: %v", v.name, err)
			continue
		}
		want := Session{Source: v.source}
		if v.key != "" {
			want.Key, want.Identity = s.named(v.key), s.Secret().Identity(v.key)
		}
		if v.parent != "" {
			want.Parent = s.named(v.parent)
		}
		want.Rendezvous = got.Rendezvous // see TestRoutersHashAKeyAlike
		want.TTL, want.Held = got.TTL, v.name == "session_params"
		if v.source == sourceNVExt {
			want.EngineSession = v.key
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", v.name, got, want)
		}
	}
}

// TestRoutersHashAKeyAlike has two routers with secrets of their own. Keys and tenants differ
// in the hash, and the source of a key does not matter.
func TestRoutersHashAKeyAlike(t *testing.T) {
	here, there := sessionRules(t, DefaultKeys...), sessionRules(t, "cookie:a", "header:X-Session-Id", "body:previous_response_id")
	here.Scope, there.Scope = "http.request.uri.query.tenant", "http.request.uri.query.tenant"
	there.Conversation = func(string) (affinity.Identity, bool) { return affinity.Identity{1}, true }
	seen := map[uint64]string{}
	for _, a := range []asked{
		{headers: "X-Session-Id: a"},
		{headers: "X-Session-Id: b"},
		{headers: "X-Session-Id: a", target: "/?tenant=t"},
		{headers: "X-Session-Id: a", body: `{"cache_salt":"t"}`},
	} {
		one, err := here.of(t, a)
		two, err2 := there.of(t, a)
		if err != nil || err2 != nil || one.Rendezvous == 0 || one.Rendezvous != two.Rendezvous || one.Key == two.Key {
			t.Errorf("%+v: %+v here, %+v there; %v, %v", a, one, two, err, err2)
		}
		if other := seen[one.Rendezvous]; other != "" {
			t.Errorf("%+v has the hash of %s", a, other)
		}
		seen[one.Rendezvous] = a.headers + a.target + a.body
	}
	header, _ := here.of(t, asked{headers: "X-Session-Id: a"})
	if body, _ := here.of(t, asked{body: `{"prompt_cache_key":"a"}`}); body.Rendezvous != header.Rendezvous {
		t.Error("the hash depends on the source")
	}
	if s, _ := there.of(t, asked{path: "/v1/responses", body: `{"previous_response_id":"r"}`}); s.Key.IsZero() || s.Rendezvous != 0 {
		t.Errorf("by an earlier response: %+v", s)
	}
}

// TestKeysOfOperators has sources that only a configuration names.
func TestKeysOfOperators(t *testing.T) {
	ask := asked{
		target:  "/v1/chat/completions?chat=+q+&chat=other&one=1",
		headers: "Cookie: sid=; sid=c; other=x\nX-Conversation: h\nX-Conversation: second\nSession_id: u",
		body:    `{"session_id":"b"}`,
	}
	for source, want := range map[string]string{
		"cookie:sid": "c", "cookie:none": "", "query:chat": "q", "query:none": "", "header:x-conversation": "h", "header:session_id": "u",
		"body:session_id": "b", "{http.request.uri.query.one}": "1", "{http.request.header.Session_id}": "u", "{http.no.such}": "",
		"header:X-Correlation-Id": "",
	} {
		s := sessionRules(t, source)
		got, err := s.of(t, ask)
		if err != nil || want == "" && got != (Session{}) || want != "" && (got.Key != s.named(want) || got.Source != source) {
			t.Errorf("%s: %+v, %v; want the key %q", source, got, err, want)
		}
	}
}

// TestLongKeysAreRefused has a key at the bound and one beyond it. Only nvext has a bound.
func TestLongKeysAreRefused(t *testing.T) {
	for source, of := range map[string]func(key string) asked{
		"nvext":                 func(key string) asked { return asked{nvext: `{"session_control":{"session_id":"` + key + `"}}`} },
		"header:X-Session-Id":   func(key string) asked { return asked{headers: "X-Session-Id: " + key} },
		"body:prompt_cache_key": func(key string) asked { return asked{body: `{"prompt_cache_key":"` + key + `"}`} },
	} {
		s := sessionRules(t, source)
		for _, n := range []int{maxSessionKey, maxSessionKey + 1} {
			got, err := s.of(t, of(strings.Repeat("k", n)))
			e, refused := errors.AsType[*api.Refusal](err)
			switch {
			case refused != (n > maxSessionKey && source == sourceNVExt):
				t.Errorf("%s, %d bytes: %v", source, n, err)
			case refused && (e.Status != http.StatusBadRequest || e.Code != "invalid_session_key" || e.Param != source || !strings.Contains(e.Error(), source)):
				t.Errorf("%s, %d bytes: %+v", source, n, e)
			case !refused && got.Key != s.named(strings.Repeat("k", n)):
				t.Errorf("%s, %d bytes: %+v", source, n, got)
			}
		}
	}
}

// TestKeysAreATenants has one key with two tenants, salts and users.
func TestKeysAreATenants(t *testing.T) {
	s := sessionRules(t, "header:X-Session-Id")
	s.Scope = "http.request.header.X-User"
	seen, parents := make(map[affinity.Key]string), make(map[affinity.Key]string)
	scopes := make(map[uint32]string)
	for _, v := range []struct{ user, salt string }{{"", ""}, {"a", ""}, {"", "a"}, {"b", ""}, {"a", "a"}, {"a", "b"}} {
		r, req, ext := asked{headers: "X-Session-Id: k\nX-Parent-Session-Id: p\nX-User: " + v.user}.read(t)
		req.Salt = v.salt
		got, err := s.find(r, req, ext)
		if err != nil || got.Identity != s.Secret().Identity("k") {
			t.Fatalf("%+v: %+v, %v", v, got, err)
		}
		name := v.user + "/" + v.salt
		if other, ok := seen[got.Key]; ok {
			t.Errorf("%s has the session of %s", name, other)
		}
		if other, ok := parents[got.Parent]; ok {
			t.Errorf("%s has the parent of %s", name, other)
		}
		if other, ok := scopes[got.Scope]; ok {
			t.Errorf("%s has the scope of %s", name, other)
		}
		if (got.Scope == 0) != (name == "/") {
			t.Errorf("%s has the scope %d", name, got.Scope)
		}
		seen[got.Key], parents[got.Parent], scopes[got.Scope] = name, name, name
	}
}

// TestResponsesContinueTheirSession names an earlier response, known and unknown.
func TestResponsesContinueTheirSession(t *testing.T) {
	s := sessionRules(t, DefaultKeys...)
	first := s.Secret().Identity("first")
	s.Conversation = func(response string) (id affinity.Identity, ok bool) {
		if response == "resp_1" {
			return first, true
		}
		return id, false
	}
	ask := asked{path: "/v1/responses", body: `{"previous_response_id":"resp_1","input":"hi"}`}
	got, err := s.of(t, ask)
	if err != nil || got.Key != s.named("first") || got.Identity != first || got.Source != "body:previous_response_id" {
		t.Errorf("%+v, %v", got, err)
	}
	ask.headers = "X-Session-Id: h"
	if got, _ := s.of(t, ask); got.Key != s.named("h") {
		t.Errorf("the header does not come first: %+v", got)
	}
	r, req, ext := asked{path: ask.path, body: ask.body}.read(t)
	req.Salt = "other"
	if got, _ := s.find(r, req, ext); got.Key == s.named("first") || got.Identity != first {
		t.Errorf("another tenant: %+v", got)
	}
	for _, response := range []string{"resp_2", "", strings.Repeat("r", 9000)} {
		if got, err := s.of(t, asked{path: ask.path, body: `{"previous_response_id":"` + response + `"}`}); err != nil || got != (Session{}) {
			t.Errorf("%.20q: %+v, %v", response, got, err)
		}
	}
}

// TestSessionsEnd has the signs by which a client ends its session.
func TestSessionsEnd(t *testing.T) {
	s := sessionRules(t, DefaultKeys...)
	for _, v := range []struct {
		ask   asked
		final bool
	}{
		{asked{headers: "X-Session-Id: a\nX-Dynamo-Session-Final: true"}, true},
		{asked{headers: "X-Session-Id: a\nX-Dynamo-Session-Final:  True "}, true},
		{asked{headers: "X-Session-Id: a\nX-Dynamo-Session-Final: false"}, false},
		{asked{headers: "X-Session-Id: a\nX-Dynamo-Session-Final: 1"}, false},
		{asked{headers: "X-Dynamo-Session-Final: true", nvext: `{"session_control":{"session_id":"a"}}`}, true},
		{asked{nvext: `{"session_control":{"session_id":"a","action":"close"}}`}, true},
		{asked{headers: "X-Dynamo-Session-Final: true"}, false}, // there is no session
	} {
		if got, err := s.of(t, v.ask); err != nil || got.Final != v.final {
			t.Errorf("%+v: %+v, %v", v.ask, got, err)
		}
	}
}

// TestListsOfSessionsNeedNoSalt has session_params for several prompts, with and without a salt.
func TestListsOfSessionsNeedNoSalt(t *testing.T) {
	for body, code := range map[string]string{
		`{"text":["a","b"],"session_params":[{"id":"s"},null]}`:             "",
		`{"text":"a","session_params":{"id":"s"},"cache_salt":"t"}`:         "",
		`{"text":["a"],"session_params":[{"id":"s"}],"cache_salt":"t"}`:     api.CodeShared,
		`{"text":["a"],"session_params":[],"nvext":{"cache_salt":"salty"}}`: api.CodeShared,
	} {
		r := httptest.NewRequest(http.MethodPost, "/generate", strings.NewReader(body))
		rd := testReader(nvext.Everything)
		rd.Sessions = *sessionRules(t)
		p, err := rd.Read(r)
		if p != nil {
			p.Close()
		}
		own, _ := errors.AsType[*api.Refusal](err)
		if (own != nil) != (code != "") || own != nil && own.Code != code {
			t.Errorf("%s: %v", body, err)
		}
	}
}
