package tests

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

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
				if x.Plan.Kind != c[3] {
					t.Errorf("%v: the prompt is of kind %s", c, x.Plan.Kind)
				}
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

// TestSecondStageFindsTheFirst has prompts whose later turns come as token_data,
// and as the prompt itself, in each API that takes them. All find the cache of the
// turns before, on the engine and to the extent that the router says.
func TestSecondStageFindsTheFirst(t *testing.T) {
	for _, v := range []struct {
		flavour engine.Flavour
		path    string
		body    string
	}{
		{engine.SGLang, "/v1/chat/completions", `"messages":[{"role":"user","content":"hi"}]`},
		{engine.TRTLLM, "/v1/chat/completions", `"messages":[{"role":"user","content":"hi"}]`},
		{engine.VLLM, "/v1/completions", `"prompt":"hi"`},
		{engine.LlamaCpp, "/v1/completions", `"prompt":"hi"`},
	} {
		t.Run(string(v.flavour), func(t *testing.T) {
			engines := []*engine.Engine{
				startSimulated(t, engine.Config{Name: "e1", Flavour: v.flavour}), startSimulated(t, engine.Config{Name: "e2", Flavour: v.flavour}),
				startSimulated(t, engine.Config{Name: "e3", Flavour: v.flavour}),
			}
			s := startCaddy(t, simulated(engines, "engine "+string(v.flavour), "response_headers X-KV-", "policy dynamo"))
			var home string
			given := func(prompt string) string {
				return `{"model":"sim-8b",` + v.body + `,"max_tokens":4,"nvext":{"token_data":` + prompt + `}}`
			}
			for turn, ask := range []struct{ path, body string }{
				{v.path, given(idsFrom(5000, 320))},
				{v.path, given(idsFrom(5000, 640))},
				{"/v1/completions", `{"model":"sim-8b","prompt":` + idsFrom(5000, 960) + `,"max_tokens":4}`},
				{v.path, given(idsFrom(5000, 1280))},
			} {
				a := s.post(t.Context(), ask.path, []byte(ask.body))
				if !a.ok() {
					t.Fatalf("status %d: %s", a.status, a.body)
				}
				if turn == 0 {
					home = a.engine()
				}
				held := gjson.GetBytes(a.body, "usage.prompt_tokens_details.cached_tokens").Int()
				if said := a.header.Get("X-KV-Predicted-Cached-Tokens"); a.engine() != home || held != int64(turn*320) || said != fmt.Sprint(held) {
					t.Errorf("turn %d: %s answers, not %s, with %d tokens cached; %s were predicted", turn, a.engine(), home, held, said)
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestTokenDataTeachesNothingFalse has requests whose text and ids have nothing in
// common. The other prompts' tokens are estimated as before, and the cache models
// have no prompt that was not computed.
func TestTokenDataTeachesNothingFalse(t *testing.T) {
	for _, types := range [][2]string{{"vllm", "vllm"}, {"sglang", "sglang"}, {"vllm", "sglang"}, {"auto", "auto"}} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
			t.Run(types[0]+types[1]+path, func(t *testing.T) {
				pool := strings.ReplaceAll(types[0]+types[1]+path, "/", "") // with a ratio of its own
				engines := startEngines(t, 2, canned.Pace{})
				s := startCaddy(t, route(engines, numbered(engines, "engine "+types[0], "engine "+types[1]), "pool "+pool))
				text := strings.Repeat("a prompt that many clients begin with ", 60)
				body := func(nvext string) string {
					return fmt.Sprintf(`{"model":"m","prompt":%q,"messages":[{"role":"user","content":%q}]%s}`, text, text, nvext)
				}
				query := func() adminExplained {
					var x adminExplained
					s.api(t, "POST", "/pools/"+pool+"/explain?path="+path, []byte(body("")), &x)
					return x
				}
				s.post(t.Context(), path, []byte(`{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}]}`))
				before := query()
				// The usage that these engines report is a quarter of the body's length.
				for range 10 {
					if a := s.post(t.Context(), path, []byte(body(`,"nvext":{"token_data":`+idsFrom(1, 5000)+`}`))); !a.ok() {
						t.Fatalf("status %d: %s", a.status, a.body)
					}
				}
				s.booksAtZero(t)
				after := query()
				takes := path == "/v1/completions" || types[0] == "sglang" && types[1] == "sglang"
				for _, c := range after.Candidates {
					if c.Overlap > 0 && takes {
						t.Errorf("worker %d is thought to hold %v blocks of a prompt that it did not compute", c.Worker, c.Overlap)
					}
				}
				if takes && after.Plan.Tokens != before.Plan.Tokens {
					t.Errorf("a prompt was taken for %d tokens, and is for %d", before.Plan.Tokens, after.Plan.Tokens)
				}
			})
		}
	}
}

// TestTokenDataIsBooked has ids beside a short prompt: the prompt that the engine
// computes is booked.
func TestTokenDataIsBooked(t *testing.T) {
	for _, kind := range []string{"sglang", "vllm"} {
		t.Run(kind, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			s := startCaddy(t, route(engines, "engine "+kind))
			g := hold(engines[0])
			go s.post(t.Context(), "/v1/chat/completions", []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"nvext":{"token_data":`+idsFrom(1, 100_000)+`}}`))
			eventually(t, 5*time.Second, "it is there", func() bool { return g.running.Load() == 1 })
			if n := s.scrape(t).value(workerPrefill); kind == "sglang" && n != 100_000 || kind == "vllm" && n > 100 {
				t.Errorf("%v tokens are booked", n)
			}
			g.pass(t, 200)
			s.booksAtZero(t)
		})
	}
}
