package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

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

// twoContexts starts a Caddy before an engine with a short context and one with a long one.
func twoContexts(t *testing.T, flavour engine.Flavour, block ...string) (s *server, short, long *engine.Engine) {
	t.Helper()
	short = startSimulated(t, engine.Config{Name: "short", Flavour: flavour, MaxModelLen: 4096})
	long = startSimulated(t, engine.Config{Name: "long", Flavour: flavour, MaxModelLen: 32768})
	s = startCaddy(t, simulated([]*engine.Engine{short, long}, append(block, "response_headers X-KV-")...))
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
	direct, err := http.Post(short.URL()+"/v1/chat/completions", "application/json", strings.NewReader(string(chatOf(2, 50000).body())))
	if err != nil {
		t.Fatal(err)
	}
	want := read(direct)
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
			s, short, _ := twoContexts(t, flavour)
			before := s.scrape(t)
			moved := 0
			for i := range uint64(6) {
				c, session, home := chatOf(i, 1000), fmt.Sprintf("session-%d", i), ""
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
					c.Messages = append(c.Messages, message{"assistant", a.text}, chatOf(100*i+uint64(turn), 540).Messages[0])
				}
			}
			after := s.scrape(t)
			if n := after.value("caddy_kv_router_session_moves_total", `reason="context"`) - before.value("caddy_kv_router_session_moves_total", `reason="context"`); moved == 0 || int(n) != moved {
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
	s := startCaddy(t, "kv_router "+short.addr()+" "+long.addr())
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

	both := startCaddy(t, "kv_router "+short.addr()+" "+answers(800, refusal).addr())
	if a := both.chat(t.Context(), ask("hello").streamed()); string(a.body) != refusal {
		t.Errorf("too long for both: %s", a.body)
	}
}
