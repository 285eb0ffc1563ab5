package tests

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// received returns the only request that the engines received.
func received(t *testing.T, engines []*canned.Engine) canned.Request {
	t.Helper()
	var all []canned.Request
	for _, e := range engines {
		all = append(all, e.Journal()...)
	}
	if len(all) != 1 {
		t.Fatalf("the engines were sent %d requests, want 1", len(all))
	}
	return all[0]
}

// gzipped returns a body compressed.
func gzipped(body string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, body)
	w.Close()
	return b.String()
}

// bodies are request bodies that must pass unchanged.
var bodies = []struct {
	name, path, body string
	header           []string
	status           int
}{
	{name: "Chat", body: `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
	{name: "OddWhitespace", body: "\n\t { \"model\"\r\n:\t\"m\" , \"messages\" : [ ] }\n \n"},
	{name: "UnknownFields", body: `{"zzz":1e400,"model":"m","messages":[{"role":"user","content":"hi","x":{"nvext":{"a":1}}}],"y":{"nvext":"z"},"big":12345678901234567890123}`},
	{name: "DuplicateKeys", body: `{"model":"a","messages":[],"model":"b","messages":[{"role":"user","content":"x"}],"temperature":1,"temperature":2}`},
	{name: "Escapes", body: `{"model":"m","messages":[{"role":"user","content":"\u00e9\ud83d\ude00\/\u0000 \ud800 ü"}]}`},
	{name: "InvalidUTF8", body: "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}"},
	{name: "NullNvext", body: `{"model":"m","nvext":null,"messages":[]}`},
	{name: "NvextInAString", body: `{"model":"m","messages":[{"role":"user","content":"\"nvext\":{\"a\":1},"}]}`},
	{name: "WithoutModel", body: `{"messages":[{"role":"user","content":"hi"}]}`},
	{name: "ModelOfOddType", body: `{"model":42,"messages":"none","stream":"yes"}`, status: 400},
	{name: "Multimodal", body: `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"what?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`},
	{name: "Completion", path: "/v1/completions", body: `{"model":"m","prompt":[1,2,3],"cache_salt":"s"}`},
	{name: "PathPrefix", path: "/some/where/v1/chat/completions?x=1&y=%2F", body: `{"model":"m","messages":[]}`},
	{name: "OtherPath", path: "/v1/audio/speech", body: `{"model":"m","input":"x","in":{"nvext":{"a":1}}, "nvext" : null}`},
	{name: "Empty", body: "", status: 400},
	{name: "Truncated", body: `{"model":"m","messages":[{"role":"us`, status: 400},
	{name: "Trailing", body: `{"model":"m","messages":[]} and more`, status: 400},
	{name: "Array", body: `[{"model":"m"}]`, status: 400},
	{name: "Scalar", body: `"model"`, status: 400},
	{name: "NotJSON", body: "model=m&prompt=x", header: []string{"Content-Type", "application/x-www-form-urlencoded"}, status: 400},
	{name: "NestedBrackets", body: strings.Repeat("[", 5<<20), status: 400},
	{name: "NestedBracketsInside", body: `{"model":"m","messages":` + strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20) + `}`, status: 400},
	{name: "NestedObjects", body: strings.Repeat(`{"messages":`, 1<<18), status: 400},
	{name: "Gzip", body: gzipped(`{"model":"m","messages":[]}`), header: []string{"Content-Encoding", "gzip"}},
	{name: "Oversized", body: `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("long ", 100_000) + `"}]}`},
}

// TestBodyReachesTheEngineByteForByte sends each body with and without a Content-Length.
// Errors in it are the engine's to report.
func TestBodyReachesTheEngineByteForByte(t *testing.T) {
	for _, v := range bodies {
		for _, chunked := range []bool{false, true} {
			name := v.name
			if chunked {
				name += "/Chunked"
			}
			t.Run(name, func(t *testing.T) {
				engines := startEngines(t, 2, canned.Pace{})
				s := startCaddy(t, route(engines, "max_body 6MiB"))
				if v.name == "Oversized" {
					s.mustReload(t, route(engines, "max_body 64KiB"))
				}
				path := cmp.Or(v.path, "/v1/chat/completions")
				var body io.Reader = strings.NewReader(v.body)
				if chunked {
					body = io.MultiReader(body) // hides its length
				}
				header := append([]string{"Content-Type", "application/json"}, v.header...)
				a := s.request(t.Context(), http.MethodPost, path, body, header...)
				want := cmp.Or(v.status, http.StatusOK)
				if a.status != want || a.err != nil || a.engine() == "" {
					t.Errorf("status %d from engine %q, error %v; want %d: %.200q", a.status, a.engine(), a.err, want, a.body)
				}
				got := received(t, engines)
				if string(got.Body) != v.body {
					t.Errorf("the engine got %d bytes %.300q, want %d bytes %.300q", len(got.Body), got.Body, len(v.body), v.body)
				}
				if got.URI != path {
					t.Errorf("the engine got the target %q, want %q", got.URI, path)
				}
				last := header[len(header)-2:]
				if g := got.Header.Get(last[0]); g != last[1] {
					t.Errorf("the engine got %s %q, want %q", last[0], g, last[1])
				}
				s.booksAtZero(t)
			})
		}
	}
}

// sendBy makes a request of any method, with pairs of header names and values, and reads its answer.
func (s *server) sendBy(t *testing.T, method, path, body string, header ...string) answer {
	t.Helper()
	return s.request(t.Context(), method, path, strings.NewReader(body), header...)
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
