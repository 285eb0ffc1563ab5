package tests

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// typed returns the lines that say of what type an engine is, with more of it.
func typed(e *canned.Engine, kind string, more ...string) string {
	return "worker " + e.Addr() + " {\nid 1\nengine " + kind + "\n" + strings.Join(more, "\n") + "\n}"
}

// members returns the members of a body that an engine received.
func members(t *testing.T, body []byte) (names []string) {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(body, &m); err != nil {
		t.Fatalf("the engine got %s: %v", body, err)
	}
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TestEnginesOwnMembersNeedTrust has clients write what nvext would need a grant
// for in the engine's own words. The router removes and counts it for clients
// that lack the grant.
func TestEnginesOwnMembersNeedTrust(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	for _, v := range []struct {
		kind, worker, path, own, grant string
		kept                           string // of own, by who is not trusted
	}{
		{"vllm", "priority on", "/v1/chat/completions", `"priority":-2147483648`, "priorities", ""},
		{"vllm", "priority on", "/invocations", `"priority":-5`, "priorities", ""},
		{"vllm", "priority off", "/v1/chat/completions", `"priority":0`, "priorities", "priority"},
		{"trtllm", "priority on", "/v1/completions", `"priority":1`, "priorities", ""},
		{"sglang", "priority on", "/generate", `"priority":9`, "priorities", ""},
		{"sglang", "", "/v1/chat/completions", `"routed_dp_rank":1,"data_parallel_rank":1`, "pins", ""},
		{"sglang", "dp_size 2", "/v1/chat/completions", `"routed_dp_rank":1`, "pins", "data_parallel_rank routed_dp_rank"},
		{"llamacpp", "", "/v1/chat/completions", `"id_slot":0`, "pins", ""},
		{"other", "priority on", "/v1/responses", `"routed_dp_rank":1,"priority":1`, "pins priorities", ""},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, v.worker), trust(v.grant)))
		body := []byte(`{"model":"m","messages":[],"prompt":"x","text":"x","input":"x",` + v.own + `}`)
		plain := strings.Fields("input messages model prompt text")
		before := s.scrape(t)
		if a := s.post(t.Context(), v.path, body, trusted...); a.status != 200 {
			t.Fatalf("%s: status %d, %.200s", v.kind, a.status, a.body)
		}
		if got := lastOf(e); !strings.Contains(v.worker, "dp_size") && string(got.Body) != string(body) {
			t.Errorf("%s, %s: of a client that is trusted the engine got %s", v.kind, v.worker, got.Body)
		}
		if n := s.scrape(t).value(nvextDropped) - before.value(nvextDropped); n != 0 {
			t.Errorf("%s: %v wishes of the trusted client were dropped", v.kind, n)
		}
		s.post(t.Context(), v.path, body)
		want := append(strings.Fields(v.kept), plain...)
		slices.Sort(want)
		if got := members(t, lastOf(e).Body); !slices.Equal(got, want) {
			t.Errorf("%s, %s: of one that is not, it got %v, want %v", v.kind, v.worker, got, want)
		}
		after := s.scrape(t)
		for grant := range strings.FieldsSeq(v.grant) {
			drops := 1.0
			if v.kept == "priority" {
				drops = 0
			}
			label := `grant="` + grant + `"`
			if n := after.value(nvextDropped, label) - before.value(nvextDropped, label); n != drops {
				t.Errorf("%s, %s: %v dropped of %s, want %v", v.kind, v.worker, n, grant, drops)
			}
		}
		s.booksAtZero(t)
	}
}

// TestCacheIsHeldForThoseWhoAreTrusted has an SGLang that keeps what has a
// priority, and clients that would have it keep theirs for years.
func TestCacheIsHeldForThoseWhoAreTrusted(t *testing.T) {
	e := startSimulated(t, engine.Config{Flavour: engine.SGLang, KeepBodies: true, ServerInfo: map[string]any{"radix_eviction_policy": "priority"}})
	s := startCaddy(t, simulated([]*engine.Engine{e}, trust("priorities"), "affinity {\nttl 2h\n}", "worker "+e.Addr()+" {\nengine sglang\n}"))
	s.mustChat(t, simChat("hello"))
	eventuallyTold(t, s, e, "sglang")
	before := s.scrape(t)
	const path = "/v1/chat/completions"
	const body = `{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2,%s}`
	const wish = `"nvext":{"cache_control":{"ttl":"100000h"}}`
	for _, v := range []struct {
		says   string
		header []string
		want   string
	}{
		{wish, nil, ""},
		{wish, trusted, `"retention_seconds":7200`},
		{`"nvext":{"cache_control":{"ttl":"5m"}}`, trusted, `"retention_seconds":300`},
		{`"retention_seconds":31536000,"priority":9`, nil, ""},
	} {
		got := string(s.receivedBy(t, e, path, fmt.Sprintf(body, v.says), v.header...).Body)
		if has := strings.Contains(got, "retention_seconds"); has != (v.want != "") || !strings.Contains(got, v.want) || v.header == nil && strings.Contains(got, "priority") {
			t.Errorf("%s with %v became %s", v.says, v.header, got)
		}
	}
	if n := s.scrape(t).value(nvextDropped, `grant="priorities"`) - before.value(nvextDropped, `grant="priorities"`); n != 2 {
		t.Errorf("%v requests of which something was dropped, want 2", n)
	}
}

// TestDirectModeKnowsTheEnginesPaths has paths that are no client's API, at which
// some engine computes all the same.
func TestDirectModeKnowsTheEnginesPaths(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "require_pin"))
	body := []byte(`{"model":"m","messages":[],"prompt":"x"}`)
	for _, path := range []string{"/invocations", "/completion", "/api/chat", "/infill", "/v1/images/generations", "/v2/embed"} {
		wantError(t, path, s.post(t.Context(), path, body), 400, "invalid_pin", "Worker ID required")
		if a := s.post(t.Context(), path, body, "X-Worker-Instance-Id", "1"); a.engine() != "e1" {
			t.Errorf("%s that names its worker: status %d", path, a.status)
		}
		named := strings.Replace(string(body), "{", `{"nvext":{"backend_instance_id":1},`, 1)
		if a := s.post(t.Context(), path, []byte(named)); a.engine() != "e1" || strings.Contains(string(lastOf(engines[0]).Body), "nvext") {
			t.Errorf("%s that names it in nvext: status %d, the engine got %s", path, a.status, lastOf(engines[0]).Body)
		}
	}
	if a := s.post(t.Context(), "/tokenize", body); a.engine() != "e1" {
		t.Errorf("what computes nothing: status %d", a.status)
	}
}

// TestNvextOfOtherAPIs has requests for no API that is known. Their nvext needs
// the same trust, and reaches no engine that does not know it.
func TestNvextOfOtherAPIs(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const path, rest = "/v1/images/generations", `"model":"m","prompt":"x"`
	const wishes = `"nvext":{"metadata_upload":{"url":"http://169.254.169.254/"},"backend_instance_id":1,"greed_sampling":true}`
	deep := `"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + ","
	for _, v := range []struct{ kind, sent, want string }{
		{"vllm", "{" + wishes + "," + rest + "}", "{" + rest + "}"},
		{"dynamo", "{" + wishes + "," + rest + "}", `{"nvext":{"greed_sampling":true},` + rest + "}"},
		{"trtllm", `{"nvext":null,` + rest + "}", "{" + rest + "}"},
		{"vllm", `{"nvext":null,` + rest + "}", `{"nvext":null,` + rest + "}"},
		{"vllm", "{" + rest + "}", "{" + rest + "}"},
		{"dynamo", "{" + deep + wishes + "," + rest + "}", "{" + deep + wishes + "," + rest + "}"}, // it cannot be read
		{"vllm", "[" + rest, "[" + rest},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind)))
		for _, header := range [][]string{
			{"Content-Type", "application/json"},
			{"Content-Type", "application/problem+json"},
			{"Content-Type", "application/json", "Content-Encoding", "foo"},
		} {
			received := len(e.Journal())
			a := s.post(t.Context(), path, []byte(v.sent), header...)
			if got := string(lastOf(e).Body); len(e.Journal()) != received+1 || got != v.want {
				t.Errorf("%s, %v: %s became %s, want %s; status %d", v.kind, header, v.sent, got, v.want, a.status)
			}
		}
		s.booksAtZero(t)
	}
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "vllm")))
	if a := s.post(t.Context(), path, []byte(`{"nvext":{"greed_sampling":1}}`)); a.status != 400 {
		t.Errorf("a malformed nvext: status %d", a.status)
	}
	large := `{"x":"` + strings.Repeat("x", 1<<20) + `",` + rest + "}"
	if s.post(t.Context(), path, []byte(large)); string(lastOf(e).Body) != large {
		t.Errorf("a long body became one of %d bytes", len(lastOf(e).Body))
	}
}

// TestNullNvextDoesNotReachTRTLLM, which refuses members that it does not know.
func TestNullNvextDoesNotReachTRTLLM(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	for kind, want := range map[string]string{"trtllm": `{"model":"m","messages":[]}`, "vllm": `{"model":"m","nvext":null,"messages":[]}`} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, kind)))
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"model":"m","nvext":null,"messages":[]}`)); a.status != 200 || string(lastOf(e).Body) != want {
			t.Errorf("%s: status %d, the engine got %s", kind, a.status, lastOf(e).Body)
		}
	}
}
