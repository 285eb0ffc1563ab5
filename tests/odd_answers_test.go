package tests

import (
	"compress/gzip"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

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
				req, err := http.NewRequestWithContext(t.Context(), method, s.url+"/"+directive+"/served"+path, strings.NewReader(`{"model":"m","messages":[{"role":"user","content":"hi"}]}`))
				if err != nil {
					t.Fatal(err)
				}
				if accepts != "" {
					req.Header.Set("Accept-Encoding", accepts)
				}
				got[i] = s.do(req)
			}
			plain, ours := got[0], got[1]
			if reads := path != "/tokenize"; reads && accepts != "" {
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
			if n := s.scrape(t).value(sessions, label); n != 0 {
				t.Errorf("%v sessions are bound", n)
			}
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
