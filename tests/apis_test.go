package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// dialect is the requests of one of the APIs.
type dialect struct {
	name, path string
	body       func(history []message, stream bool) map[string]any
	// Where a plain answer has its text, and where the events of a stream have
	// pieces of it. APIs without a decode phase have neither.
	plain, piece string
	grown        bool   // each event has the text from its beginning
	end          string // of a stream that is whole
}

func (d dialect) streams() bool { return d.piece != "" }

// joined is a history as one text.
func joined(history []message) string {
	var b strings.Builder
	for _, m := range history {
		b.WriteString(m.Content)
	}
	return b.String()
}

// asMessages separates the system prompt, as Anthropic's API requires.
func asMessages(history []message, _ bool) map[string]any {
	doc := map[string]any{"model": "canned"}
	if history[0].Role == "system" {
		doc["system"], history = history[0].Content, history[1:]
	}
	doc["messages"] = history
	return doc
}

// dialects are all APIs that the router reads. A request to an API without a decode phase
// has the history as one text.
var dialects = []dialect{
	{
		name: "Chat", path: "/v1/chat/completions", plain: "choices.0.message.content", piece: "choices.0.delta.content", end: "data: [DONE]",
		body: func(history []message, stream bool) map[string]any {
			return map[string]any{"model": "canned", "messages": history, "stream": stream}
		},
	},
	{
		name: "Completions", path: "/v1/completions", plain: "choices.0.text", piece: "choices.0.text", end: "data: [DONE]",
		body: func(history []message, stream bool) map[string]any {
			return map[string]any{"model": "canned", "prompt": joined(history), "stream": stream}
		},
	},
	{
		name: "Responses", path: "/v1/responses", plain: "output.0.content.0.text", piece: "delta", end: `"type":"response.completed"`,
		body: func(history []message, stream bool) map[string]any {
			return map[string]any{"model": "canned", "input": history, "store": false, "stream": stream}
		},
	},
	{
		name: "Messages", path: "/v1/messages", plain: "content.0.text", piece: "delta.text", end: `"type":"message_stop"`,
		body: func(history []message, stream bool) map[string]any {
			doc := asMessages(history, stream)
			doc["max_tokens"], doc["stream"] = 1000, stream
			return doc
		},
	},
	{name: "CountTokens", path: "/v1/messages/count_tokens", body: asMessages},
	{
		name: "Generate", path: "/generate", plain: "text", piece: "text", grown: true, end: "data: [DONE]",
		body: func(history []message, stream bool) map[string]any {
			return map[string]any{"text": joined(history), "sampling_params": map[string]any{"max_new_tokens": 24}, "stream": stream}
		},
	},
	{name: "Embeddings", path: "/v1/embeddings", body: func(history []message, _ bool) map[string]any {
		return map[string]any{"model": "canned", "input": []string{joined(history)}}
	}},
	{name: "Rerank", path: "/v1/rerank", body: func(history []message, _ bool) map[string]any {
		return map[string]any{"model": "canned", "query": joined(history), "documents": []string{"by the sea", "in the hills"}}
	}},
	{name: "Score", path: "/v1/score", body: func(history []message, _ bool) map[string]any {
		return map[string]any{"model": "canned", "text_1": joined(history), "text_2": []string{"by the sea", "in the hills"}}
	}},
	{name: "Classify", path: "/v1/classify", body: func(history []message, _ bool) map[string]any {
		return map[string]any{"model": "canned", "input": joined(history)}
	}},
}

// mustJSON returns a request's bytes.
func mustJSON(doc any) []byte {
	out, err := json.Marshal(doc)
	if err != nil {
		panic(err)
	}
	return out
}

// said returns the text of an answer, and whether the answer is complete.
func (d dialect) said(a answer, stream bool) (text string, whole bool) {
	if a.status != 200 || a.err != nil {
		return "", false
	}
	if !stream {
		return gjson.GetBytes(a.body, d.plain).Str, gjson.ValidBytes(a.body)
	}
	for line := range strings.Lines(string(a.body)) {
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		piece := gjson.Get(data, d.piece)
		switch {
		case d.grown && piece.Exists():
			text = piece.Str
		default:
			text += piece.Str
		}
	}
	return text, strings.Contains(string(a.body), d.end)
}

// TestEachAPIReturnsToItsEngine holds conversations through each API. APIs without an
// answer to continue get texts that grow.
func TestEachAPIReturnsToItsEngine(t *testing.T) {
	for _, d := range dialects {
		for _, stream := range []bool{false, true} {
			if d.name == "CountTokens" || stream && !d.streams() {
				continue
			}
			t.Run(fmt.Sprintf("%s/Stream=%v", d.name, stream), func(t *testing.T) {
				engines := startEngines(t, 4, canned.Pace{})
				s := startCaddy(t, route(engines, "policy warmest"))
				convs := newConversations(40, 11)
				s.converse(t, convs, 5, stream, d)
				// These are few conversations, and the router rightly avoids engines that the machine stalls.
				share := kept(convs)
				if counts, top := spread(engines); share < 0.95 || top > 2.4 {
					t.Errorf("%.1f %% of later turns kept their engine, want at least 95; the engines had %v requests", 100*share, counts)
				}
				s.booksAtZero(t)
			})
		}
	}
}

// refusals are the router's own errors and their causes.
var refusals = []struct {
	code   string
	status int
	openAI string // the type that OpenAI's clients know
	claude string // and Anthropic's
	site   func(engines []*canned.Engine) string
	fault  canned.Fault
	killed bool
	nvext  string // added to the body
	// Caddy's request_body refuses by the Content-Length, if there is one, and
	// says so in its own way.
	chunked bool
}{
	{
		code: "no_worker", status: 503, openAI: "server_error", claude: "overloaded_error", killed: true,
		site: func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "invalid_nvext", status: 400, openAI: "invalid_request_error", claude: "invalid_request_error", nvext: `"nvext":5,`,
		site: func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "invalid_session_key", status: 400, openAI: "invalid_request_error", claude: "invalid_request_error",
		nvext: `"nvext":{"session_control":{"session_id":"` + strings.Repeat("k", 1025) + `"}},`,
		site:  func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "model_not_found", status: 404, openAI: "invalid_request_error", claude: "not_found_error",
		site: func(e []*canned.Engine) string { return route(e, "worker * {\nmodels other\n}") },
	},
	{
		code: "body_too_large", status: 413, openAI: "invalid_request_error", claude: "request_too_large", chunked: true,
		site: func(e []*canned.Engine) string { return "request_body {\nmax_size 10\n}\n" + route(e) },
	},
	{
		code: "worker_failed", status: 502, openAI: "server_error", claude: "api_error",
		fault: canned.Fault{Kind: canned.CloseAfterRead},
		site:  func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "worker_timeout", status: 504, openAI: "server_error", claude: "timeout_error",
		fault: canned.Fault{Kind: canned.HangBeforeHeader},
		site: func(e []*canned.Engine) string {
			return "kv_router {\nreverse_proxy " + addresses(e) + " {\ntransport http {\nresponse_header_timeout 50ms\n}\n}\n}"
		},
	},
}

// TestOwnErrorsHaveTheAPIsShape causes each refusal in each API, in servers with and
// without error routes.
func TestOwnErrorsHaveTheAPIsShape(t *testing.T) {
	for _, v := range refusals {
		for _, routes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/ErrorRoutes=%v", v.code, routes), func(t *testing.T) {
				engines := startEngines(t, 2, canned.Pace{})
				site := v.site(engines)
				if routes {
					site += "\nhandle_errors {\nrespond \"ours: {err.status_code}\"\n}"
				}
				for _, e := range engines {
					e.SetFault(v.fault)
					if v.killed {
						e.Kill()
					}
				}
				s := startCaddy(t, site)
				eachRequest(t, func(t *testing.T, d dialect, _ bool, body []byte) {
					if v.code == "model_not_found" && d.name == "Generate" {
						return // its requests name no model
					}
					var sent io.Reader = strings.NewReader("{" + v.nvext + string(body[1:]))
					if v.chunked {
						sent = io.MultiReader(sent) // hides its length
					}
					a := s.request(t.Context(), http.MethodPost, d.path, sent)
					if a.status != v.status || a.err != nil {
						t.Fatalf("status %d, error %v, want %d; body %s", a.status, a.err, v.status, a.body)
					}
					if wait := a.header.Get("Retry-After"); (wait != "") != (v.status == http.StatusServiceUnavailable && !routes) {
						t.Errorf("Retry-After %q", wait)
					}
					if routes {
						if want := fmt.Sprintf("ours: %d", v.status); string(a.body) != want {
							t.Errorf("body %q, want that of the error route, %q", a.body, want)
						}
						return
					}
					kind, outer := v.openAI, ""
					if strings.HasPrefix(d.path, "/v1/messages") {
						kind, outer = v.claude, "error"
					}
					fault := gjson.GetBytes(a.body, "error")
					if fault.Get("code").Str != v.code || fault.Get("type").Str != kind || fault.Get("message").Str == "" || gjson.GetBytes(a.body, "type").Str != outer {
						t.Errorf("body %s, want the code %s and the type %s", a.body, v.code, kind)
					}
					equal(t, a.header.Get("Content-Type"), "application/json", "Content-Type")
				})
				s.booksAtZero(t)
			})
		}
	}
}

// direct is a client that reaches an engine without a router.
func direct(e interface{ Addr() string }) *server {
	return &server{url: "http://" + e.Addr(), client: http.DefaultClient}
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
				want := direct(engines[1]).post(t.Context(), d.path, body)
				if mode.ill {
					engines[0].SetFault(refusal)
				}
				for range 2 {
					a := s.post(t.Context(), d.path, body, "X-Session-Id", d.name)
					if a.status != http.StatusOK || a.err != nil || string(a.body) != string(want.body) {
						t.Errorf("status %d, error %v, got\n%s\nwant\n%s", a.status, a.err, a.body, want.body)
					}
					equal(t, a.header.Get("Content-Type"), want.header.Get("Content-Type"), "Content-Type")
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
				want := direct(engines[0]).post(t.Context(), path, []byte(strings.Replace(v.body, `"nvext":{},`, "", 1)))
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
