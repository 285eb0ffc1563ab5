package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// direct is a client that reaches an engine without a router.
func direct(s *server, e *canned.Engine) *server {
	return &server{url: "http://" + e.Addr(), client: s.client}
}

// lastOf returns the last request that an engine received.
func lastOf(e *canned.Engine) canned.Request {
	journal := e.Journal()
	return journal[len(journal)-1]
}

// eachRequest runs a test for a request to each API, streamed and plain.
func eachRequest(t *testing.T, test func(t *testing.T, d dialect, stream bool, body []byte)) {
	t.Helper()
	history := []message{{"system", "Be brief."}, {"user", "Which way to the harbour?"}}
	for _, d := range dialects {
		for _, stream := range []bool{false, true} {
			if stream && !d.streams() {
				continue
			}
			t.Run(fmt.Sprintf("%s/Stream=%v", d.name, stream), func(t *testing.T) {
				test(t, d, stream, mustJSON(d.body(history, stream)))
			})
		}
	}
}

// TestAnswersAreTheEnginesOwn compares each answer with the engine's answer to a direct
// client.
func TestAnswersAreTheEnginesOwn(t *testing.T) {
	for _, mode := range []struct {
		name  string
		block []string
		ill   bool // the first engine refuses
	}{
		{name: "Default"},
		{name: "UsageInject", block: []string{"inject_usage"}},
		{name: "RoundRobin", block: []string{"policy round_robin"}},
		{name: "Everything", block: []string{"inject_usage", "response_headers X-KV-", "affinity {\nkey body:prompt_cache_key header:X-Session-Id\n}"}},
		{name: "AfterARetry", block: []string{"policy round_robin", "inject_usage"}, ill: true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, mode.block...))
			eachRequest(t, func(t *testing.T, d dialect, stream bool, body []byte) {
				want := direct(s, engines[1]).post(t.Context(), d.path, body)
				if mode.ill {
					engines[0].SetFault(refusal)
				}
				for range 2 {
					a := s.post(t.Context(), d.path, body, "X-Session-Id", d.name)
					if a.status != http.StatusOK || a.err != nil || string(a.body) != string(want.body) {
						t.Errorf("status %d, error %v, got\n%s\nwant\n%s", a.status, a.err, a.body, want.body)
					}
					if got := a.header.Get("Content-Type"); got != want.header.Get("Content-Type") {
						t.Errorf("Content-Type %q, want %q", got, want.header.Get("Content-Type"))
					}
				}
				if _, whole := d.said(want, stream); !whole {
					t.Errorf("the engine's own answer is not whole: %s", want.body)
				}
			})
			s.booksAtZero(t)
		})
	}
}

// TestInjectedUsageIsTakenOutAgain compares requests and answers with and without
// inject_usage.
func TestInjectedUsageIsTakenOutAgain(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "pool injected", "inject_usage"))
	const asked = `"stream_options":{"include_usage":true}`
	for _, api := range [][2]string{
		{"/v1/chat/completions", `"model":"canned","messages":[{"role":"user","content":"hi"}]`},
		{"/v1/completions", `"model":"canned","prompt":"hi"`},
	} {
		path, rest := api[0], api[1]
		for _, v := range []struct{ name, body, sent string }{
			{"Unasked", `{` + rest + `,"stream":true}`, `{` + asked + `,` + rest + `,"stream":true}`},
			{"Spaced", "\n{ " + rest + " ,\t\"stream\" : true }\n", "\n{" + asked + ", " + rest + " ,\t\"stream\" : true }\n"},
			{"Null", `{"stream_options":null,"stream":true,` + rest + `}`, `{` + asked + `,"stream":true,` + rest + `}`},
			{"Empty", `{"stream":true,"stream_options":{},` + rest + `}`, ""}, // which vLLM takes for a yes
			{"False", `{"stream":true,"stream_options":{"include_usage":false},` + rest + `}`, `{"stream":true,` + asked + `,` + rest + `}`},
			{"OtherOptions", `{"stream":true,"stream_options":{"include_usage":null,"x":1},` + rest + `}`, `{"stream":true,"stream_options":{"include_usage":true,"x":1},` + rest + `}`},
			{"Nvext", `{"nvext":{},` + rest + `,"stream":true}`, `{` + asked + `,` + rest + `,"stream":true}`},
			{"AskedByTheClient", `{"stream":true,` + asked + `,` + rest + `}`, ""},
			{"Plain", `{` + rest + `}`, ""},
		} {
			t.Run(strings.TrimPrefix(path, "/v1/")+"/"+v.name, func(t *testing.T) {
				before := s.scrape(t)
				want := direct(s, engines[0]).post(t.Context(), path, []byte(strings.Replace(v.body, `"nvext":{},`, "", 1)))
				got := s.post(t.Context(), path, []byte(v.body))
				if got.status != http.StatusOK || got.err != nil || string(got.body) != string(want.body) {
					t.Errorf("status %d, error %v, got\n%s\nwant\n%s", got.status, got.err, got.body, want.body)
				}
				counted := float64(1)
				if v.name == "Empty" {
					counted = 0 // this engine takes it for a no
				}
				if v.sent == "" {
					v.sent = v.body
				}
				if sent := string(lastOf(engines[0]).Body); sent != v.sent {
					t.Errorf("the engine got\n%s\nwant\n%s", sent, v.sent)
				}
				s.wantFigures(t, before, []figure{
					{inputTokens + "_count", []string{`pool="injected"`}, counted},
					{inputTokens + "_sum", []string{`pool="injected"`}, counted * float64(len(v.sent)/4+1)},
					{outputTokens + "_sum", []string{`pool="injected"`}, counted * 24},
				})
			})
		}
	}
	eachRequest(t, func(t *testing.T, d dialect, stream bool, body []byte) {
		if stream && (d.name == "Chat" || d.name == "Completions") {
			return
		}
		s.post(t.Context(), d.path, body)
		if sent := string(lastOf(engines[0]).Body); sent != string(body) {
			t.Errorf("the engine got\n%s\nwant\n%s", sent, body)
		}
	})
	s.booksAtZero(t)
}
