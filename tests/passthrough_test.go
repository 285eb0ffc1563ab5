package tests

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strconv"
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
				equal(t, got.URI, path, "the engine's target")
				last := header[len(header)-2:]
				equal(t, got.Header.Get(last[0]), last[1], "the engine's %s", last[0])
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
	const hints = `"cache_salt":"victim","priority":99,"routed_dp_rank":1,"session_params":{"id":"s"},"session_id":"s"`
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
		s.sendBy(t, v.method, v.path, `{"text":"x",`+hints+`}`, "X-Tenant-Id", "mine")
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

// packs is an engine that compresses all answers, whatever it is asked. Between
// the events of a stream it waits for next.
func packs(next <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		stream := strings.Contains(string(body), `"stream":true`)
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		defer z.Close()
		switch {
		case r.URL.Path == "/v1/models":
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(z, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		case !stream:
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(z, withUsage)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			for _, event := range []string{oneChunk, oneChunk, "data: " + withUsage + "\n\n", "data: [DONE]\n\n"} {
				io.WriteString(z, event)
				z.Flush()
				http.NewResponseController(w).Flush()
				<-next
			}
		}
	}
}

const withUsage = `{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}`

// TestAnswersAreUnpacked has an engine that compresses though it is asked not to.
// A client that asked for nothing gets what it can read, as with reverse_proxy.
// The router reads it, too, whatever the client asked for.
func TestAnswersAreUnpacked(t *testing.T) {
	engine := serveRaw(t, packs(nil))
	s := startCaddy(t, places([]pair{proxies("served", engine)}, freeAddr(t)))
	before := s.scrape(t)
	for _, path := range []string{"/v1/chat/completions", "/v1/models", "/tokenize"} {
		for _, accepts := range []string{"", "identity", "gzip"} {
			var got [2]answer
			for i, directive := range directives {
				method := http.MethodPost
				if path == "/v1/models" {
					method = http.MethodGet
				}
				header := []string{"Content-Type", "application/json"}
				if accepts != "" {
					header = append(header, "Accept-Encoding", accepts)
				}
				got[i] = s.sendBy(t, method, "/"+directive+"/served"+path, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`, header...)
			}
			plain, ours := got[0], got[1]
			if accepts != "" {
				if ours.header.Get("Content-Encoding") != "" || !ours.whole {
					t.Errorf("%s, %q: coding %q, body %q", path, accepts, ours.header.Get("Content-Encoding"), ours.body)
				}
			} else if string(ours.body) != string(plain.body) || ours.header.Get("Content-Encoding") != plain.header.Get("Content-Encoding") || ours.header.Get("Content-Length") != plain.header.Get("Content-Length") {
				t.Errorf("%s, %q: got %v %q, want %v %q", path, accepts, ours.header, ours.body, plain.header, plain.body)
			}
		}
	}
	s.wantFigures(t, before, []figure{
		{fallbacksTotal, nil, 0},
		{inputTokens + "_sum", []string{`pool="served"`}, 3 * 9},
	})
	s.booksAtZero(t)
}

// TestBodyWithAWrongEncodingReachesTheClient has an engine that labels plain JSON
// as gzip: the client gets the answer.
func TestBodyWithAWrongEncodingReachesTheClient(t *testing.T) {
	plain := func(body string) string {
		return serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Content-Encoding", "gzip")
			io.WriteString(w, body)
		})
	}
	for _, body := range []string{withUsage, "1", ""} {
		s := startCaddy(t, "kv_router "+plain(body))
		for _, accepts := range []string{"", "gzip"} {
			a := s.post(t.Context(), "/v1/chat/completions", ask("hi").body(), "Accept-Encoding", accepts)
			if a.status != http.StatusOK || a.err != nil || string(a.body) != body {
				t.Errorf("Accept-Encoding %q: status %d, error %v, body %q, want %q", accepts, a.status, a.err, a.body, body)
			}
		}
	}
}

const (
	htmlPage  = "<!DOCTYPE html>\n<html><body>Please log in.</body></html>\n"
	wholeJSON = `{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}`
)

// malformeds are answers that are not what their content type says, or are errors.
var malformeds = []struct {
	name, kind, body string
	stream           bool
}{
	{"ErrorEvent", "text/event-stream", "data: {\"error\":{\"message\":\"out of memory\"}}\n\ndata: [DONE]\n\n", true},
	{"Error", "application/json", `{"error":{"message":"out of memory"}}`, false},
	{"JSONAsStream", "text/event-stream", wholeJSON, true},
	{"HTMLAsStream", "text/event-stream; charset=utf-8", htmlPage, true},
	{"EmptyStream", "text/event-stream", "", true},
	{"HTMLAsJSON", "application/json", htmlPage, false},
	{"HTML", "text/html", htmlPage, false},
	{"StreamAsJSON", "application/json", oneChunk + "data: [DONE]\n\n", true},
	{"CutJSON", "application/json; charset=utf-8", wholeJSON[:60], false},
	{"NoJSON", "application/json", "", false},
}

func sendAs(kind, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		if !strings.HasPrefix(kind, "text/event-stream") {
			w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		}
		io.WriteString(w, body)
	}
}

// TestMalformedAnswerPassesAndTeachesNothing has engines that answer such
// things with status 200.
func TestMalformedAnswerPassesAndTeachesNothing(t *testing.T) {
	for _, v := range malformeds {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			pool := "malformed-" + v.name
			s := startCaddy(t, route(engines, "pool "+pool, "response_headers X-KV-"))
			c := ask(strings.Repeat("some words ", 300))
			c.Stream = v.stream
			setAll(engines, sendAs(v.kind, v.body))
			unreadable, session := 4.0, []string{"X-Session-Id", "malformed"}
			if strings.HasPrefix(v.name, "Error") { // the client may be to blame: its session stays
				unreadable, session = 0, nil
			}
			before := s.scrape(t)
			for i := range 4 {
				a := s.chat(t.Context(), c, session...)
				s.booksAtZero(t)
				if a.status != http.StatusOK || a.err != nil || string(a.body) != v.body || a.header.Get("Content-Type") != v.kind {
					t.Errorf("status %d, error %v, type %q, body %q", a.status, a.err, a.header.Get("Content-Type"), a.body)
				}
				if overlap, reason := a.header.Get("X-KV-Overlap-Blocks"), a.header.Get("X-KV-Reason"); overlap != "0" || reason != "load" {
					t.Errorf("request %d: %q blocks overlap, reason %q", i+1, overlap, reason)
				}
			}
			label := `pool="` + pool + `"`
			s.wantFigures(t, before, []figure{
				{fallbacksTotal, []string{label, `reason="answer_unreadable"`}, unreadable},
				{requestsTotal, []string{label, `outcome="engine_error"`}, 4},
				{requestsTotal, []string{label}, 4},
			})
			equal(t, s.scrape(t).value(sessions, label), 0, "bound sessions")
			if _, page, err := s.get(t.Context(), "http://"+s.admin+"/kv_router/pools/"+pool); err != nil || strings.Contains(page, `"prefill_tokens_per_second"`) {
				t.Errorf("error %v; a prefill rate was learned: %s", err, page)
			}
			setAll(engines, nil)
			s.mustChat(t, c)
			s.booksAtZero(t)
			if a := s.mustChat(t, c); a.header.Get("X-KV-Overlap-Blocks") == "0" {
				t.Error("a good answer leaves no overlap")
			}
		})
	}
}
