package tests

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
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
func numbered[E interface{ Addr() string }](engines []E, more ...string) string {
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

// withHints returns a chat with an nvext.
func withHints(content, nvext string) chat {
	c := ask(content)
	c.Nvext = json.RawMessage(nvext)
	return c
}

// errorOf returns the code and the message of a refusal.
func errorOf(a answer) (code, message string) {
	return gjson.GetBytes(a.body, "error.code").String(), gjson.GetBytes(a.body, "error.message").Str
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

// typed returns the worker option with an engine's type, and further lines of it.
func typed(e *canned.Engine, kind string, more ...string) string {
	return "worker " + e.Addr() + " {\nid 1\nengine " + kind + "\n" + strings.Join(more, "\n") + "\n}"
}

// members returns the members of a body that an engine received.
func members(t *testing.T, body []byte) []string {
	t.Helper()
	var m map[string]json.RawMessage
	noError(t, json.Unmarshal(body, &m))
	return slices.Sorted(maps.Keys(m))
}

// dropped returns how many hints were dropped for the lack of a grant, empty for any.
func (s *server) dropped(t *testing.T, grant string) float64 {
	t.Helper()
	if grant == "" {
		return s.scrape(t).value(nvextDropped)
	}
	return s.scrape(t).value(nvextDropped, `grant="`+grant+`"`)
}

// TestGrants sends each kind of hint from a client with the grant and from one without.
// Without it the router counts the hint and drops it before the engine.
func TestGrants(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	prompt := strings.Repeat("a prompt that is long enough for several blocks ", 20)
	for _, v := range []struct {
		grant, nvext string
		header       []string
		// applied tells of an answer whether the hint was.
		applied func(s *server, a answer) bool
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
			if a := s.chat(t.Context(), withHints(prompt, v.nvext), append(v.header, trusted...)...); !v.applied(s, a) {
				t.Errorf("%s of a client that is trusted: status %d, header %v, body %.300q", v.nvext, a.status, a.header, a.body)
			}
			equal(t, s.scrape(t).value(nvextDropped)-before.value(nvextDropped), 0, "dropped hints of the trusted client")
			a := s.mustChat(t, withHints(prompt, v.nvext), v.header...)
			if v.applied(s, a) && !strings.HasPrefix(v.nvext, `{"decode`) || a.header.Get("X-KV-Reason") == "pin" {
				t.Errorf("%s of a client that is not trusted was applied: header %v", v.nvext, a.header)
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
				equal(t, after.value(nvextDropped, label)-before.value(nvextDropped, label), want, "hints dropped of %s", name)
			}
			s.booksAtZero(t)
		})
	}
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
			var header []string
			if r.coding != "" {
				header = []string{"Content-Encoding", r.coding}
			}
			for _, name := range routingHeaders {
				value := "1"
				if strings.Contains(name, "Rank") {
					value = "0"
				}
				if strings.Contains(name, "Prefill") {
					value = "4294967295x" // one that is granted would be a 400
				}
				header = append(header, name, value)
			}
			a := s.sendBy(t, r.method, r.path, r.body, header...)
			journal := engines[0].Journal()[before:]
			unread := r.coding != "" || len(r.body) > 1024 || r.body == `{"model":`
			if unread && strings.Contains(v.block, "tenants") {
				if len(journal) != 0 || a.status < 400 {
					t.Errorf("a tenant's body that was not read: status %d", a.status)
				}
				continue
			}
			if len(journal) != 1 {
				t.Errorf("%s %s: status %d, the engine was sent %d requests", r.method, r.path, a.status, len(journal))
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

// TestEnginesOwnMembersNeedTrust has clients use the engine's own members for hints that
// need a grant in nvext. Without the grant, the router removes and counts them.
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
		before := s.dropped(t, "")
		if a := s.post(t.Context(), v.path, body, trusted...); a.status != 200 {
			t.Fatalf("%s: status %d, %.200s", v.kind, a.status, a.body)
		}
		if got := lastOf(e); !strings.Contains(v.worker, "dp_size") && string(got.Body) != string(body) {
			t.Errorf("%s, %s: of a client that is trusted the engine got %s", v.kind, v.worker, got.Body)
		}
		equal(t, s.dropped(t, "")-before, 0, "%s: dropped hints of the trusted client", v.kind)
		s.post(t.Context(), v.path, body)
		want := append(strings.Fields(v.kept), plain...)
		slices.Sort(want)
		if got := members(t, lastOf(e).Body); !slices.Equal(got, want) {
			t.Errorf("%s, %s: of one that is not, it got %v, want %v", v.kind, v.worker, got, want)
		}
		drops := float64(len(strings.Fields(v.grant)))
		if v.kept == "priority" {
			drops = 0
		}
		equal(t, s.dropped(t, "")-before, drops, "%s, %s: hints dropped", v.kind, v.worker)
		s.booksAtZero(t)
	}
}

// TestNvextOfOtherAPIs has requests of unknown APIs. Their nvext needs the same trust, and
// reaches no engine that does not know nvext.
func TestNvextOfOtherAPIs(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const path, rest = "/v1/images/generations", `"model":"m","prompt":"x"`
	const hints = `"nvext":{"metadata_upload":{"url":"http://169.254.169.254/"},"backend_instance_id":1,"greed_sampling":true}`
	deep := `"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + ","
	for _, v := range []struct{ kind, sent, want string }{
		{"vllm", "{" + hints + "," + rest + "}", "{" + rest + "}"},
		{"dynamo", "{" + hints + "," + rest + "}", `{"nvext":{"greed_sampling":true},` + rest + "}"},
		{"trtllm", `{"nvext":null,` + rest + "}", "{" + rest + "}"},
		{"vllm", `{"nvext":null,` + rest + "}", `{"nvext":null,` + rest + "}"},
		{"vllm", "{" + rest + "}", "{" + rest + "}"},
		{"dynamo", "{" + deep + hints + "," + rest + "}", "{" + deep + hints + "," + rest + "}"}, // it cannot be read
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

// TestHeadersOfEnginesNeedTrust sends headers by which a Dynamo chooses a request's class in
// its queue. It also sends headers that an SGLang may take for members of the body, which never
// pass.
func TestHeadersOfEnginesNeedTrust(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	for _, v := range []struct {
		kind, grant, path string
		header            []string
		passes            bool // if the client is trusted
	}{
		{"dynamo", "priorities", "/v1/chat/completions", []string{"X-Dynamo-Meta-Policy-Class", "gold", "X-Dynamo-Meta-Other", "x"}, true},
		{"dynamo", "priorities", "/v1/audio/speech", []string{"X-Dynamo-Meta-Policy-Class", "gold"}, true},
		{"sglang", "pins", "/generate", []string{"X-Override-Routed-Dp-Rank", "1", "X-Override-Priority", "99", "X-Override-Rid", "r"}, false},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, "dp_size 2"), trust(v.grant)))
		for _, trusts := range []bool{false, true} {
			before := s.dropped(t, v.grant)
			all, drops := append([]string{"X-Dynamo-Session-Id", "s", "X-Dynamo-Session-Final", "true"}, v.header...), 1.0
			if trusts {
				all, drops = append(all, trusted...), 0
			}
			s.sendBy(t, "POST", v.path, string(ask("hi").body()), all...)
			got := lastOf(e).Header
			for i := 0; i < len(v.header); i += 2 {
				if (got.Get(v.header[i]) != "") != (trusts && v.passes) {
					t.Errorf("%s, trusted %v: the engine got %v", v.path, trusts, got)
				}
			}
			if v.kind == "dynamo" && (got.Get("X-Dynamo-Session-Id") != "s" || got.Get("X-Dynamo-Session-Final") != "true") {
				t.Errorf("%s, trusted %v: the Dynamo got %v", v.path, trusts, got)
			}
			equal(t, s.dropped(t, v.grant)-before, drops, "%s, trusted %v: hints dropped", v.path, trusts)
		}
	}
}

// TestTrailersDoNotPass has trailers behind a body, with routing headers among them.
func TestTrailersDoNotPass(t *testing.T) {
	trailers := make(chan http.Header, 1)
	addr := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.UserAgent() != "kv_router" {
			trailers <- r.Trailer
		}
		_, _ = io.WriteString(w, "{}")
	})
	s := startCaddy(t, "kv_router "+addr+" {\npool trailers\nmax_body 64KiB\ntrust priorities\n}")
	for _, v := range []struct{ path, body string }{
		{"/v1/chat/completions", `{"messages":[]}`}, // which is read
		{"/v1/chat/completions", `{"x":"` + strings.Repeat("x", 128<<10) + `"}`},
		{"/upload", "x"},
	} {
		conn := s.connect(t)
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"+
			"Trailer: X-Tenant-Id, X-Dynamo-Request-Priority, X-Sum\r\n\r\n%x\r\n%s\r\n0\r\nX-Tenant-Id: victim\r\nX-Dynamo-Request-Priority: 9\r\nX-Override-Priority: 9\r\nX-Sum: 1\r\n\r\n",
			v.path, s.addr, len(v.body), v.body)
		_ = conn.SetDeadline(time.Now().Add(patience))
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v, %v", v.path, resp, err)
		}
		resp.Body.Close()
		conn.Close()
		select {
		case got := <-trailers:
			if len(got) != 0 {
				t.Errorf("%s of %d bytes: the engine got the trailer %v", v.path, len(v.body), got)
			}
		case <-time.After(patience):
			t.Fatalf("%s did not reach the engine", v.path)
		}
	}
	s.booksAtZero(t)
}

// TestFirstRequestsAreHeldToTheSame has an SGLang that orders by priority, and that
// the router has not asked yet what it is.
func TestFirstRequestsAreHeldToTheSame(t *testing.T) {
	whenInTime(t, "reports", func(t *testing.T) bool {
		sim := startSimulated(t, engine.Config{Flavour: engine.SGLang, KeepBodies: true, ServerInfo: map[string]any{"enable_priority_scheduling": true}})
		s := startCaddy(t, route([]*engine.Engine{sim}))
		got := s.receivedBy(t, sim, "/v1/chat/completions", `{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"priority":99}`)
		s.awaitType(t, sim.Addr(), string(engine.SGLang))
		known := s.isInTime(t, "worker reports its engine")
		if known && strings.Contains(string(got.Body), "priority") {
			t.Errorf("the engine got %s", got.Body)
		}
		return known
	})
	// who has told nothing by then is served as by any proxy
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}))
	if a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"messages":[],"priority":99}`)); a.status != 200 || !strings.Contains(string(lastOf(e).Body), `"priority":99`) {
		t.Errorf("status %d, the engine got %s", a.status, lastOf(e).Body)
	}
}
