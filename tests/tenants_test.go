package tests

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// digest is how a text is known that an engine cannot have as it is.
func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return "sha256:" + hex.EncodeToString(sum[:])
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
		s.api(t, "GET", defaultPool+"/sessions/mine?model=canned&tenant="+tenant, nil, &session)
		if !session.Bound {
			t.Errorf("tenant %q: the session is not bound", tenant)
		}
	}
	equal(t, s.pool(t).Sessions, 3, "sessions")
	// A key that is written as a tenant's is kept is nobody's but the client's.
	s.mustChat(t, withHints("hello", `{"session_control":{"session_id":"\u0000t1:amine"}}`))
	s.mustChat(t, withHints("hello", `{"session_params":{"id":"mine"}}`))
	equal(t, s.pool(t).Sessions, 4, "sessions")
	eventually(t, "the end", func() bool { return s.pool(t).Leases == 0 })
}

// TestSaltsAreEnforced has a pool of two engines, one of which does not keep caches apart.
// Requests with a salt go to the other one or are refused.
func TestSaltsAreEnforced(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	engines[1].SetVersion("0.12.0")
	block := func(first, second string) string {
		return route(engines, "worker "+engines[0].Addr()+" {\nid 1\n"+first+"\n}\nworker "+engines[1].Addr()+" {\nid 2\n"+second+"\n}", "enforce_cache_salt", "trust tenants pins", "policy round_robin")
	}
	chat := func(s *server, header ...string) answer {
		return s.post(t.Context(), "/v1/chat/completions", ask("hello").body(), header...)
	}
	tenant := []string{"X-Tenant-Id", "mine"}
	s := startCaddy(t, block("engine llamacpp", "engine vllm"))
	eventually(t, "the version of the one that does", func() bool { return s.worker(t, engines[1].Addr()).Engine.Version != "" })
	seen := map[string]bool{}
	for range 6 {
		if a := chat(s, tenant...); a.engine() != "e2" {
			t.Errorf("a tenant's was answered by %q, status %d, %.200s", a.engine(), a.status, a.body)
		}
	}
	for range 6 {
		seen[chat(s).engine()] = true
	}
	if len(seen) != 2 {
		t.Errorf("without a tenant answered by %v", seen)
	}
	for _, salted := range []string{`"cache_salt":"s"`, `"nvext":{"cache_salt":"s"}`} {
		for range 3 {
			if a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"model":"m","messages":[],`+salted+`}`)); a.engine() != "e2" {
				t.Errorf("%s: answered by %q", salted, a.engine())
			}
		}
	}
	const code = "cache_salt_unsupported"
	wantError(t, "pinned", chat(s, append([]string{"X-Worker-Instance-Id", "1"}, tenant...)...), 400, code, "worker 1", "chat")
	for _, path := range []string{"/v1/messages", "/v1/embeddings", "/invocations", "/v1/rerank"} {
		a := s.post(t.Context(), path, []byte(`{"model":"m","messages":[],"input":"x"}`), tenant...)
		if a.status != 400 || !strings.Contains(string(a.body), code) {
			t.Errorf("%s: status %d, body %.300s", path, a.status, a.body)
		}
	}
	if a := s.post(t.Context(), "/v1/messages", []byte(`{"model":"m","messages":[]}`), tenant...); !strings.HasPrefix(string(a.body), `{"type":"error"`) {
		t.Errorf("Anthropic's shape: %s", a.body)
	}
	for _, path := range []string{"/v1/messages/count_tokens", "/tokenize"} { // which leave nothing in a cache
		if a := s.post(t.Context(), path, []byte(`{"model":"m","messages":[]}`), tenant...); a.engine() == "" {
			t.Errorf("%s: status %d, %.200s", path, a.status, a.body)
		}
	}
	x := s.explain(t, []byte(`{"model":"m","messages":[],"cache_salt":"s"}`))
	if len(x.LeftOut) != 1 || x.LeftOut[0].Why != "shares_cache" || x.LeftOut[0].Dial != engines[0].Addr() {
		t.Errorf("it is explained as %+v", x.LeftOut)
	}
	// the one that keeps them apart is gone: nobody else takes its place
	engines[1].Kill()
	if a := chat(s, tenant...); a.status != http.StatusServiceUnavailable && a.status != http.StatusBadGateway {
		t.Errorf("with the other one gone: status %d by %q", a.status, a.engine())
	}
	revive(t, engines[1])
	// the operator says more of them than is known, and that counts
	s = startCaddy(t, block("engine llamacpp", "engine vllm\ncache_salt on"))
	for _, path := range []string{"/v1/messages", "/invocations"} {
		a := s.post(t.Context(), path, []byte(`{"model":"m","messages":[],"cache_salt":"victim"}`), tenant...)
		if a.engine() != "e2" || !strings.Contains(string(lastOf(engines[1]).Body), `"cache_salt":"mine"`) {
			t.Errorf("%s, said to be on: status %d, %.200s", path, a.status, a.body)
		}
	}
	wantError(t, "what nobody is told a salt in", s.post(t.Context(), "/encode", []byte(`{"model":"m"}`), tenant...), 400, code)
	s = startCaddy(t, block("", ""))
	wantError(t, "not known yet", chat(s, tenant...), 400, code, "is known to")
	s = startCaddy(t, block("engine vllm", "engine vllm"))
	for _, none := range []string{"null", `""`} {
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"model":"m","messages":[],"cache_salt":`+none+`}`)); !a.ok() {
			t.Errorf("no salt, %s: status %d, %.200s", none, a.status, a.body)
		}
	}
	// by default they are told apart where that can be, and no more
	s = startCaddy(t, strings.Replace(block("engine llamacpp", "engine llamacpp"), "enforce_cache_salt", "", 1))
	if a := chat(s, tenant...); !a.ok() {
		t.Errorf("by default: status %d", a.status)
	}
}

// TestSessionsOfTenantsAreApart has two tenants that name the same session of a Dynamo and
// of an SGLang.
func TestSessionsOfTenantsAreApart(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	ids := []string{"X-Dynamo-Session-Id", "X-Dynamo-Parent-Session-Id", "X-Session-Id", "X-Claude-Code-Session-Id", "Thread-Id"}
	for kind, gets := range map[string]func(canned.Request) []string{
		"dynamo": func(r canned.Request) (got []string) {
			for _, name := range ids {
				got = append(got, r.Header.Get(name))
			}
			return got
		},
		"sglang": func(r canned.Request) []string {
			return []string{string(r.Body)}
		},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, kind), "trust tenants"))
		seen := map[string]string{}
		for _, tenant := range []string{"a", "b", "a", ""} {
			var header []string
			if tenant != "" {
				header = append(header, "X-Tenant-Id", tenant)
			}
			for _, name := range ids {
				header = append(header, name, "s")
			}
			body := `{"model":"m","messages":[],"session_id":"s","session_params":{"id":"s","rid":"r"}}`
			if a := s.post(t.Context(), "/v1/chat/completions", []byte(body), header...); !a.ok() {
				t.Fatalf("%s: status %d, error %v, body %.200q", kind, a.status, a.err, a.body)
			}
			got := fmt.Sprint(gets(lastOf(e)))
			if before, again := seen[tenant]; again && before != got {
				t.Errorf("%s: a session of %q became another one: %s, then %s", kind, tenant, before, got)
			}
			seen[tenant] = got
		}
		if seen["a"] == seen["b"] || seen["a"] == seen[""] {
			t.Errorf("%s: tenants share a session: %v", kind, seen)
		}
		if plain := gets(canned.Request{}); kind == "dynamo" && seen[""] != fmt.Sprint(strings.Fields(strings.Repeat("s ", len(plain)))) {
			t.Errorf("%s: without a tenant the engine got %s", kind, seen[""])
		}
		if kind == "dynamo" && slices.Contains(strings.Fields(strings.Trim(seen["a"], "[]")), "s") {
			t.Errorf("the Dynamo got the client's own id: %s", seen["a"])
		}
		if kind == "sglang" && (strings.Contains(seen["a"], `"id":"s"`) || strings.Contains(seen["a"], `"session_id":"s"`) || !strings.Contains(seen["a"], `"rid":"r"`)) {
			t.Errorf("the SGLang got %s", seen["a"])
		}
	}
	// what nvext says of the session is scoped in the same way
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "dynamo"), "trust tenants"))
	session := func(header ...string) string {
		s.mustChat(t, withHints("hi", `{"session_control":{"session_id":"s"}}`), header...)
		return lastOf(e).Header.Get("X-Dynamo-Session-Id")
	}
	s.mustChat(t, ask("hi"), "X-Tenant-Id", "a", "X-Dynamo-Session-Id", "s")
	byHeader := lastOf(e).Header.Get("X-Dynamo-Session-Id")
	if a := session("X-Tenant-Id", "a"); a != byHeader || a == session("X-Tenant-Id", "b") || session() != "s" {
		t.Errorf("of nvext it is %q, by header %q, without a tenant %q", a, byHeader, session())
	}
}

// TestTenantsOfAnyName has names that a Dynamo cannot read in a header, or that are longer
// than a salt may be. What the client writes beside them never counts.
func TestTenantsOfAnyName(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	long := strings.Repeat("x", 9000)
	const body = `{"model":"m","messages":[],"cache_salt":"victim","nvext":{"cache_salt":"victim","greed_sampling":true}}`
	for _, v := range []struct{ kind, tenant, want string }{
		{"dynamo", "my own", "my own"},
		{"dynamo", "müller", digest("müller")},
		{"dynamo", long, digest(long)},
		{"vllm", "müller", "müller"},
		{"vllm", long, digest(long)},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, "cache_salt on"), "trust tenants", "enforce_cache_salt"))
		a := s.post(t.Context(), "/v1/chat/completions", []byte(body), "X-Tenant-Id", v.tenant)
		got := lastOf(e)
		if a.status != 200 || strings.Contains(string(got.Body), "victim") {
			t.Errorf("%s, %.20q: status %d, the engine got %.200s", v.kind, v.tenant, a.status, got.Body)
		}
		if v.kind == "dynamo" && (fmt.Sprint(got.Header["X-Tenant-Id"]) != "["+v.want+"]" || !strings.Contains(string(got.Body), `"greed_sampling":true`)) {
			t.Errorf("%.20q: the Dynamo got the tenant %.100q, and %s", v.tenant, got.Header["X-Tenant-Id"], got.Body)
		}
		if v.kind == "vllm" && !strings.Contains(string(got.Body), `"cache_salt":"`+v.want+`"`) {
			t.Errorf("%.20q: the engine got %.200s", v.tenant, got.Body)
		}
	}
	// a gateway that adds its tenant behind a name of the client's
	s := startCaddy(t, "request_header +X-Tenant-Id mine\n"+route([]*canned.Engine{e}, typed(e, "vllm"), "trust tenants"))
	s.post(t.Context(), "/v1/chat/completions", []byte(body), "X-Tenant-Id", "other")
	if got := string(lastOf(e).Body); !strings.Contains(got, `"cache_salt":"other, mine"`) {
		t.Errorf("the engine got %.200s", got)
	}
	// who is not granted it has none, however long
	s = startCaddy(t, route([]*canned.Engine{e}, typed(e, "vllm")))
	before := s.dropped(t, "tenants")
	s.post(t.Context(), "/v1/chat/completions", []byte(`{"messages":[],"cache_salt":"own"}`), "X-Tenant-Id", long)
	if got := string(lastOf(e).Body); got != `{"messages":[],"cache_salt":"own"}` || lastOf(e).Header.Get("X-Tenant-Id") != "" {
		t.Errorf("without trust the engine got %s", got)
	}
	equal(t, s.dropped(t, "tenants")-before, 1, "hints dropped of tenants")
}

// TestClassesAndTenants has the operator's matchers choose the class, and placeholders the tenant. What
// clients say of themselves counts only where it is granted.
func TestClassesAndTenants(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	const show = "header >X-Who \"{http.kv_router.class}|{http.kv_router.tenant}\"\n"
	s := startCaddy(t, `@evals {
	method POST
	header X-Job eval*
}
`+show+route(engines, trust("priorities tenants"), `class chat {
	match header X-Class chat
	match {
		path /v1/completions
		header X-Class both
	}
	match `+"expression `{http.kv_router.priority} > 4`"+`
	weight 4
}
class batch {
	match @evals
	background
}
class named {
	match vars {http.kv_router.model} other
	ttft 1m
	late demote default
}`))
	with := func(header ...string) []string { return header }
	hint := func(priority int) string { return fmt.Sprintf(`{"agent_hints":{"priority":%d}}`, priority) }
	for _, v := range []struct {
		nvext, model string
		header       []string
		want         string
	}{
		{"", "", nil, "default|"},
		{"", "", with("X-Class", "chat"), "chat|"},
		{"", "", with("X-Class", "both"), "default|"},
		{"", "", with("X-Job", "evals-7"), "batch|"},
		{"", "", with("X-Job", "evals-7", "X-Class", "chat"), "chat|"},
		{hint(5), "", nil, "default|"},
		{hint(5), "", trusted, "chat|"},
		{hint(4), "", trusted, "default|"},
		{"", "", append(with("X-Dynamo-Request-Priority", "9"), trusted...), "chat|"},
		{"", "", with("X-Dynamo-Request-Priority", "9"), "default|"},
		{"", "", with("X-Tenant-Id", "acme"), "default|"},
		{"", "", append(with("X-Tenant-Id", "acme"), trusted...), "default|acme"},
		{"", "other", nil, "named|"},
	} {
		c := ask("who am I?")
		if v.nvext != "" {
			c = withHints("who am I?", v.nvext)
		}
		if v.model != "" {
			c.Model = v.model
		}
		a := s.chat(t.Context(), c, v.header...)
		if got := a.header.Get("X-Who"); got != v.want {
			t.Errorf("%s %s %v: %q, want %q; status %d", v.nvext, v.model, v.header, got, v.want, a.status)
		}
	}
	s.mustReload(t, show+route(engines, "tenant {header.X-Org}", trust("tenants"), "class default {\nttft 10s {header.X-Llm-D-Slo-Ttft-Ms}\n}"))
	for _, org := range []string{"", "acme", strings.Repeat("x", 200)} {
		want := org
		if len(org) > 128 {
			want = digest(org)
		}
		a := s.mustChat(t, ask("who am I?"), append(with("X-Org", org, "X-Tenant-Id", "other", "X-Llm-D-Slo-Ttft-Ms", "NaN"), trusted...)...)
		equal(t, a.header.Get("X-Who"), "default|"+want, "X-Who for X-Org %q", org)
	}
}
