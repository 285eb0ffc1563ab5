package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

// idsFrom returns n token ids as JSON, which do not repeat.
func idsFrom(first, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, ",%d", first+i)
	}
	return "[" + b.String()[1:] + "]"
}

// explainAt is explain for another API than chat.
func (s *server) explainAt(t testing.TB, path, body string, header ...string) (x adminExplained) {
	t.Helper()
	s.api(t, "POST", defaultPool+"/explain?path="+path, []byte(body), &x, header...)
	return x
}

// TestWhichPromptIsPlanned has requests with token_data before workers of several
// types. The ids are the prompt if the engines of all workers take them in the API,
// else the body's prompt is.
func TestWhichPromptIsPlanned(t *testing.T) {
	const chats, completions = "/v1/chat/completions", "/v1/completions"
	const first = `,"backend_instance_id":1`
	for _, pool := range []struct {
		types [2]string
		cases [][4]string // path, what else nvext has, the model, the kind of prompt
	}{
		{[2]string{"sglang", "sglang"}, [][4]string{{chats, "", "m", "tokens"}, {completions, "", "m", "tokens"}, {"/generate", "", "m", "tokens"}, {"/v1/messages", "", "m", "text"}}},
		{[2]string{"vllm", "vllm"}, [][4]string{{chats, "", "m", "text"}, {completions, "", "m", "tokens"}, {"/inference/v1/generate", "", "m", "tokens"}}},
		{[2]string{"sglang", "vllm"}, [][4]string{
			{chats, "", "m", "text"},
			{completions, "", "m", "tokens"},
			{chats, first, "m", "text"},
		}},
		{[2]string{"trtllm", "sglang"}, [][4]string{{chats, "", "m", "tokens"}}},
		{[2]string{"llamacpp", "other"}, [][4]string{{chats, "", "m", "text"}, {completions, "", "m", "tokens"}}},
		{[2]string{"dynamo", "vllm"}, [][4]string{{chats, "", "m", "text"}, {completions, "", "m", "text"}}},
		{[2]string{"auto", "auto"}, [][4]string{{chats, "", "m", "text"}, {completions, "", "m", "tokens"}}},
	} {
		t.Run(strings.Join(pool.types[:], ","), func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, numbered(engines,
				"models m only1\ntaints a\nengine "+pool.types[0], "models m only2\ntaints b\nengine "+pool.types[1]), "trust pins overrides"))
			s.mustChat(t, chat{Model: "m", Messages: []message{{"user", "hello"}}})
			for _, c := range pool.cases {
				body := `{"model":"` + c[2] + `","messages":[{"role":"user","content":"x"}],"prompt":"x","text":"x","token_ids":[1],"max_tokens":1,"nvext":{"token_data":` + idsFrom(1, 1000) + c[1] + `}}`
				x := s.explainAt(t, c[0], body)
				equal(t, x.Plan.Kind, c[3], "%v: kind of the prompt", c)
				if n := x.Plan.Tokens; c[3] == "tokens" && (n != 1000 || x.Plan.Blocks != 62) || c[3] == "text" && n > 100 {
					t.Errorf("%v: %d tokens and %d blocks are planned", c, n, x.Plan.Blocks)
				}
				a := s.post(t.Context(), c[0], []byte(body))
				if !a.ok() {
					t.Errorf("%v: status %d, %s", c, a.status, a.body)
				}
				var got struct {
					Given json.RawMessage `json:"input_ids"`
				}
				for _, e := range engines {
					if e.Name() == a.engine() {
						_ = json.Unmarshal(lastOf(e).Body, &got)
					}
				}
				if c[0] == chats && pool.types[0] == "sglang" && (c[3] == "tokens") != (got.Given != nil) {
					t.Errorf("%v: the engine got the ids %.40s", c, got.Given)
				}
			}
			s.booksAtZero(t)
		})
	}
}

// idList returns n token ids as JSON, without brackets.
func idList(first, n int) string { return strings.Trim(idsFrom(first, n), "[]") }

// tokenAnswers answers prompts of token ids with 40 tokens, whose ids begin at 9000, as
// vLLM and SGLang do. incremental says that SGLang's streams carry each id once.
func tokenAnswers(t *testing.T, incremental bool) *fake {
	t.Helper()
	tells := fakeVLLM("0.32.0", func() string { return "" })
	return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return tells(w, r)
		}
		body, _ := io.ReadAll(r.Body)
		prompt := len(gjson.GetBytes(body, "prompt").Array()) + len(gjson.GetBytes(body, "input_ids").Array()) + len(gjson.GetBytes(body, "token_ids").Array())
		told := func(from, n int) string {
			if gjson.GetBytes(body, "return_token_ids").Bool() || r.URL.Path != "/v1/completions" {
				return fmt.Sprintf(`,"token_ids":[%s]`, idList(from, n))
			}
			return ""
		}
		usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":40}`, prompt)
		stream := gjson.GetBytes(body, "stream").Bool()
		var events []string
		switch {
		case r.URL.Path == "/generate" && stream:
			for n := 10; n <= 40; n += 10 {
				from := 0
				if incremental {
					from = n - 10
				}
				finish := "null"
				if n == 40 {
					finish = `{"type":"length"}`
				}
				events = append(events, fmt.Sprintf(`{"text":%q,"output_ids":[%s],"meta_info":{"prompt_tokens":%d,"completion_tokens":%d,"finish_reason":%s}}`,
					strings.Repeat("x ", n), idList(9000+from, n-from), prompt, n, finish))
			}
		case r.URL.Path == "/generate":
			events = append(events, fmt.Sprintf(`{"text":"x","output_ids":[%s],"meta_info":{"prompt_tokens":%d,"completion_tokens":40,"finish_reason":{"type":"length"}}}`, idList(9000, 40), prompt))
		case r.URL.Path == "/v1/chat/completions":
			events = append(events, fmt.Sprintf(`{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length","response_token_ids":[%s]}],%s}`, idList(9000, 40), usage))
		case stream:
			for n := 0; n < 40; n += 10 {
				events = append(events, fmt.Sprintf(`{"choices":[{"index":0,"text":"x"%s,"finish_reason":null}]}`, told(9000+n, 10)))
			}
			events = append(events, `{"choices":[{"index":0,"text":"","finish_reason":"length"}],`+usage+`}`)
		default:
			events = append(events, fmt.Sprintf(`{"choices":[{"index":0,"text":"x"%s,"finish_reason":"length"}],%s}`, told(9000, 40), usage))
		}
		if !stream {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, events[0])
			return true
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range append(events, "[DONE]") {
			fmt.Fprintf(w, "data: %s\n\n", e)
		}
		return true
	})
}

// TestTokenPromptsRememberTheAnswer has conversations of token ids. The second turn begins
// with the first one and its answer. The engine may not have computed the last token of
// the answer.
func TestTokenPromptsRememberTheAnswer(t *testing.T) {
	for _, c := range []struct {
		name, path, prompt  string
		asks                bool // for the answer's ids
		stream, incremental bool
	}{
		{"completions", "/v1/completions", "prompt", true, false, false},
		{"completions streamed", "/v1/completions", "prompt", true, true, false},
		{"completions without ids", "/v1/completions", "prompt", false, false, false},
		{"completions streamed without ids", "/v1/completions", "prompt", false, true, false},
		{"generate", "/generate", "input_ids", false, false, false},
		{"generate streamed", "/generate", "input_ids", false, true, false},
		{"generate streamed in pieces", "/generate", "input_ids", false, true, true},
		{"chat of SGLang", "/v1/chat/completions", "input_ids", true, false, false},
		{"tokens", "/inference/v1/generate", "token_ids", false, false, false},
		{"tokens streamed", "/inference/v1/generate", "token_ids", false, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := tokenAnswers(t, c.incremental)
			s := startCaddy(t, "kv_router "+f.Addr()+" {\nresponse_headers X-KV-\n}")
			ask := func(ids string) string {
				body := fmt.Sprintf(`{"model":"canned","%s":[%s],"stream":%v,"stream_options":{"include_usage":true},"return_token_ids":%v}`, c.prompt, ids, c.stream, c.asks)
				a := s.post(t.Context(), c.path, []byte(body))
				if a.status != http.StatusOK || a.err != nil {
					t.Fatalf("status %d, error %v, %s", a.status, a.err, a.body)
				}
				return a.header.Get("X-KV-Predicted-Cached-Tokens")
			}
			prompt := idList(100, 325)
			equal(t, ask(prompt), "0", "predicted for the first turn")
			want := "352"
			if !c.asks && c.path == "/v1/completions" {
				want = "320" // the answer's ids are not known
			}
			equal(t, ask(prompt+","+idList(9000, 40)+","+idList(500, 90)), want, "predicted for the second turn")
			equal(t, ask(prompt+","+idList(7000, 40)+","+idList(500, 90)), "320", "predicted after another answer")
			equal(t, ask(prompt), "320", "predicted for the first turn again")
		})
	}
}

// TestPromptsWithoutAModel asks SGLang in its own form, which has no model, and in OpenAI's.
func TestPromptsWithoutAModel(t *testing.T) {
	tells := fakeSGLang(`"version":"0.5.23"`)
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPost {
			fmt.Fprint(w, `{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"text":"x","meta_info":{"finish_reason":{"type":"length"}}}`)
			return true
		}
		return tells(w, r)
	})
	s := startCaddy(t, "kv_router "+f.Addr()+" {\nresponse_headers X-KV-\n}")
	text := strings.Repeat("some words of a prompt ", 60)
	s.mustPost(t, fmt.Appendf(nil, `{"model":"sim-8b","messages":[]}`)) // the model is known now
	for i, c := range []struct{ path, body string }{
		{"/v1/completions", `{"model":"sim-8b","prompt":%q}`},
		{"/generate", `{"text":%q}`},
		{"/v1/completions", `{"prompt":%q}`},
		{"/v1/completions", `{"model":"sim-8b","prompt":%q}`},
	} {
		a := s.post(t.Context(), c.path, fmt.Appendf(nil, c.body, text))
		if got := a.header.Get("X-KV-Predicted-Cached-Tokens"); a.status != http.StatusOK || (got == "0") != (i == 0) {
			t.Errorf("%s %.30s: status %d, %s tokens predicted", c.path, c.body, a.status, got)
		}
	}
}

// TestRequestsThatSkipTheCacheProveNothing has an engine that computes the whole prompt
// for its log probabilities, and reports so.
func TestRequestsThatSkipTheCacheProveNothing(t *testing.T) {
	f, s := countlessSGLang(t, func(body string) string {
		if strings.Contains(body, `"prompt_logprobs":0`) || strings.Contains(body, `"cache_prompt":false`) {
			return fmt.Sprintf(withCached, 0)
		}
		return fmt.Sprintf(withCached, 1950)
	})
	before := s.scrape(t)
	prompt := func(i int, member string) []byte {
		body := string(simChat(strings.Repeat(fmt.Sprint(" some words of ", i%6), 400)).body())
		return []byte(strings.Replace(body, "{", "{"+member, 1))
	}
	for i := range 12 {
		s.mustPost(t, prompt(i, ""))
	}
	for i := range 12 {
		s.mustPost(t, prompt(i, `"prompt_logprobs":0,`))
		s.mustPost(t, prompt(i, `"cache_prompt":false,`))
	}
	worker := `worker="` + f.Addr() + `"`
	s.wantFigures(t, before, []figure{{"caddy_kv_router_prediction_error_tokens_count", []string{worker}, 12}})
	after := s.scrape(t)
	if n := after.value(mirrorCleared, worker); n > 0 {
		t.Errorf("the cache model was cleared %v times", n)
	}
	if w := s.worker(t, f.Addr()); w.Cache.Cached == 0 {
		t.Error("the cache model is empty")
	}
	x := s.explain(t, prompt(0, `"prompt_logprobs":2,`))
	y := s.explain(t, prompt(0, `"prompt_logprobs":null,"cache_prompt":true,`))
	if x.Candidates[0].Tokens != 0 || y.Candidates[0].Tokens < 1000 {
		t.Errorf("predicted with and without: %d, %d", x.Candidates[0].Tokens, y.Candidates[0].Tokens)
	}
}

// posts returns how many POST requests an engine got, and how many of them it refused.
func posts(e *engine.Engine) (all, refused int) {
	for _, r := range e.Journal() {
		if r.Method == http.MethodPost {
			all++
			if r.Status >= 400 {
				refused++
			}
		}
	}
	return all, refused
}

// lastPost returns the last POST request that an engine got: the router may ask what it serves at any time.
func lastPost(e *engine.Engine) (last engine.Record) {
	for _, r := range e.Journal() {
		if r.Method == http.MethodPost {
			last = r
		}
	}
	return last
}

// twoContexts starts a Caddy before an engine with a short context and one with a long one.
func twoContexts(t *testing.T, flavour engine.Flavour, block ...string) (s *server, short, long *engine.Engine) {
	t.Helper()
	short = startSimulated(t, engine.Config{Name: "short", Flavour: flavour, MaxModelLen: 4096})
	long = startSimulated(t, engine.Config{Name: "long", Flavour: flavour, MaxModelLen: 32768})
	s = startCaddy(t, route([]*engine.Engine{short, long}, append(block, "response_headers X-KV-")...))
	for _, e := range []*engine.Engine{short, long} {
		s.awaitType(t, e.Addr(), string(flavour))
	}
	return s, short, long
}

// chatOf returns a chat of about n tokens for the simulated engines.
func chatOf(seed uint64, n int) chat {
	rng := rand.New(rand.NewPCG(5, seed)) //nolint:gosec // a test
	return simChat(prose(rng, 4*n, 4*n+1))
}

// TestLongPromptsGoWhereTheyFit sends prompts that are too long for one of two engines, in all forms.
func TestLongPromptsGoWhereTheyFit(t *testing.T) {
	s, short, long := twoContexts(t, engine.VLLM)
	long6k := chatOf(1, 6000).Messages[0].Content
	ids, _ := json.Marshal(make([]int, 4100))
	for path, body := range map[string]string{
		"/v1/chat/completions":            fmt.Sprintf(`{"model":"sim-8b","messages":[{"role":"user","content":%q}]}`, long6k),
		"/v1/completions":                 fmt.Sprintf(`{"model":"sim-8b","max_tokens":4,"prompt":%q}`, long6k),
		"/v1/completions?ids":             fmt.Sprintf(`{"model":"sim-8b","max_tokens":4,"prompt":%s}`, ids),
		"/v1/messages":                    fmt.Sprintf(`{"model":"sim-8b","max_tokens":4,"messages":[{"role":"user","content":%q}]}`, long6k),
		"/v1/responses":                   fmt.Sprintf(`{"model":"sim-8b","input":%q}`, long6k),
		"/v1/chat/completions?max_tokens": `{"model":"sim-8b","max_tokens":5000,"messages":[{"role":"user","content":"hi"}]}`,
	} {
		path, _, _ = strings.Cut(path, "?")
		for range 3 {
			if a := s.post(t.Context(), path, []byte(body)); a.status != http.StatusOK {
				t.Errorf("%s: status %d, body %.300s", path, a.status, a.body)
			}
		}
	}
	if all, _ := posts(short); all > 0 {
		t.Errorf("the short engine got %d requests", all)
	}

	// what is too long for both is refused by an engine
	want := direct(short).chat(t.Context(), chatOf(2, 50000))
	before, _ := posts(long)
	for range 4 {
		a := s.chat(t.Context(), chatOf(2, 50000))
		if a.status != want.status || gjson.GetBytes(a.body, "error.type").Str != gjson.GetBytes(want.body, "error.type").Str ||
			!strings.Contains(string(a.body), "maximum context length") {
			t.Errorf("too long for both: status %d, body %s, want the engine's %s", a.status, a.body, want.body)
		}
	}
	if after, _ := posts(long); after == before {
		t.Error("the long engine was not asked")
	}
	s.mustChat(t, simChat("hello"))
	if n := s.logged(t, "marked down") + s.logged(t, "condition begins"); n > 0 {
		t.Errorf("%d lines blame somebody", n)
	}
}

// TestConversationOutgrowsItsWorker has conversations grow beyond the context of the engine that they
// are bound to. Their turns go on at the other one.
func TestConversationOutgrowsItsWorker(t *testing.T) {
	for _, flavour := range []engine.Flavour{engine.VLLM, engine.SGLang, engine.LlamaCpp} {
		t.Run(string(flavour), func(t *testing.T) {
			s, short, long := twoContexts(t, flavour, "policy round_robin")
			before := s.scrape(t)
			moved := 0
			for i := range uint64(6) {
				c, session, home := chatOf(i, 1000), fmt.Sprintf("session-%d", i), ""
				// Half of the conversations begin at the short one, whatever speeds the router has learned.
				if i%2 == 0 {
					s.drain(t, long, "drain")
				}
				for turn := range 9 { // of 550 tokens
					a := s.chat(t.Context(), c, "X-Session-Id", session)
					if !a.ok() {
						t.Fatalf("session %d, turn %d: status %d, body %.300s", i, turn, a.status, a.body)
					}
					at := a.header.Get("X-Kv-Worker")
					if home != "" && at != home {
						moved++
					}
					home = at
					if turn == 0 && i%2 == 0 {
						s.drain(t, long, "undrain")
					}
					c.Messages = append(c.Messages, message{"assistant", a.text}, chatOf(100*i+uint64(turn), 540).Messages[0])
				}
			}
			after := s.scrape(t)
			if n := after.value("caddy_kv_router_session_moves_total", `reason="context"`) - before.value("caddy_kv_router_session_moves_total", `reason="context"`); moved < 3 || int(n) != moved {
				t.Errorf("%d conversations moved, %v because of the context", moved, n)
			}
			_, refused := posts(short)
			if n := after.value(retriesTotal, `reason="context"`) - before.value(retriesTotal, `reason="context"`); int(n) != refused {
				t.Errorf("%v retries of %d refusals", n, refused)
			}
			if n := s.logged(t, "marked down"); n > 0 {
				t.Errorf("%d marks", n)
			}
		})
	}
}

// TestLongerWorkerIsAway has the only worker with room for a prompt be down: the client comes back.
// What is too long for that one, too, is refused at once.
func TestLongerWorkerIsAway(t *testing.T) {
	s, _, long := twoContexts(t, engine.VLLM)
	long.Kill()
	for i := range 4 {
		mustPutOff(t, s, "/v1/chat/completions", string(chatOf(1, 6000).body()))
		if a := s.chat(t.Context(), chatOf(2, 50000)); a.status != http.StatusBadRequest {
			t.Errorf("try %d of a prompt that is too long for all: status %d, body %s", i, a.status, a.body)
		}
		s.mustChat(t, simChat("hello"))
	}
	revive(t, long)
	eventually(t, "the prompt to be served", func() bool { return s.chat(t.Context(), chatOf(1, 6000)).ok() })
}

// TestLengthErrorInAStream has an engine refuse a prompt in its stream, as SGLang does. The request is
// asked at an engine with a longer context, and computed there once.
func TestLengthErrorInAStream(t *testing.T) {
	const refusal = `data: {"error":{"object":"error","message":"The input (900 tokens) is longer than the model's context length (800 tokens).","type":"BadRequestError","code":400}}` + "\n\ndata: [DONE]\n\n"
	answers := func(context int, stream string) *fake {
		return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
			switch {
			case r.URL.Path == "/v1/models":
				fmt.Fprintf(w, `{"data":[{"id":"canned","owned_by":"sglang","max_model_len":%d}]}`, context)
			case r.URL.Path == "/server_info":
				fmt.Fprint(w, `{"max_total_num_tokens":1000000,"random_seed":1,"internal_states":[{}]}`)
			case r.Method == http.MethodPost:
				w.Header().Set("Content-Type", "text/event-stream")
				_ = http.NewResponseController(w).Flush()
				_, _ = io.WriteString(w, stream)
			default:
				return false
			}
			return true
		})
	}
	const token = `data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"canned","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"
	short, long := answers(800, refusal), answers(8000, token)
	s := startCaddy(t, "kv_router "+short.Addr()+" "+long.Addr())
	for _, e := range []*fake{short, long} {
		s.awaitType(t, e.Addr(), "sglang")
	}
	for range 12 {
		if a := s.chat(t.Context(), ask("hello").streamed()); !a.ok() || a.text != "word " {
			t.Errorf("status %d, error %v, body %s", a.status, a.err, a.body)
		}
	}
	const chats = "/v1/chat/completions"
	refused, served := short.asked(chats), long.asked(chats)
	if refused == 0 || served != 12 {
		t.Errorf("the short engine was asked %d times, the long one %d times", refused, served)
	}
	if n := s.logged(t, "marked down") + s.logged(t, "condition begins"); n > 0 {
		t.Errorf("%d lines blame somebody", n)
	}

	both := startCaddy(t, "kv_router "+short.Addr()+" "+answers(800, refusal).Addr())
	if a := both.chat(t.Context(), ask("hello").streamed()); string(a.body) != refusal {
		t.Errorf("too long for both: %s", a.body)
	}
}
