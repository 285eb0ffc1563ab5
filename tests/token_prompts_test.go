package tests

import (
	"encoding/json"
	"fmt"
	"strconv"
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

// TestSecondStageFindsTheFirst has prompts whose later turns come as token_data, and as
// the prompt itself, in each API that accepts them. Each turn finds the cache of the turns
// before, and the router predicts how much.
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

// idList returns n token ids as JSON, without brackets.
func idList(first, n int) string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = strconv.Itoa(first + i)
	}
	return strings.Join(ids, ",")
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
	after := s.scrape(t)
	if n := after.value(mirrorCleared, `worker="`+f.addr()+`"`); n > 0 {
		t.Errorf("the cache model was cleared %v times", n)
	}
	if w := s.fakeWorker(t, f.addr()); w.Cache.Cached == 0 {
		t.Error("the cache model is empty")
	}
	worker := `worker="` + f.addr() + `"`
	const errors = "caddy_kv_router_prediction_error_tokens_count"
	if n := after.value(errors, worker) - before.value(errors, worker); n != 12 {
		t.Errorf("%v predictions were compared, want those of 12 requests", n)
	}
	x := s.explain(t, prompt(0, `"prompt_logprobs":2,`))
	y := s.explain(t, prompt(0, `"prompt_logprobs":null,"cache_prompt":true,`))
	if x.Candidates[0].Tokens != 0 || y.Candidates[0].Tokens < 1000 {
		t.Errorf("predicted with and without: %d, %d", x.Candidates[0].Tokens, y.Candidates[0].Tokens)
	}
}
