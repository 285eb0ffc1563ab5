package engine

import (
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// paths are the paths of the clients' APIs.
var paths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/inference/v1/generate", "/v1/embeddings",
	"/v1/rerank", "/v1/score", "/v1/classify", "/pooling", "/v1/messages/count_tokens",
}

// apiOf returns the API of a path, or the one for all other paths.
func apiOf(path string) api.API {
	if a := api.For(path); a != nil {
		return a
	}
	return api.Unplanned
}

// outcome is what an engine gets.
type outcome struct {
	body    string
	headers []Header
	lacks   []string
}

// asked is a request and the engine that gets it.
type asked struct {
	Request
	Engine
}

// adapted returns what an engine gets of a request. set may change both.
func adapted(t testing.TB, kind, path, body string, set func(*asked)) outcome {
	t.Helper()
	a := apiOf(path)
	parsed, err := api.Parse(a, []byte(body), api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var ext nvext.Ext
	if parsed.NVExt != nil {
		if ext, err = nvext.Parse(parsed.NVExt, nvext.MaxTTL); err != nil {
			t.Fatal(err)
		}
	}
	r := asked{
		Request{API: a.Name(), Body: parsed.Editor([]byte(body)), Ext: &ext, Grants: nvext.Everything, GiveTokens: true, Ranks: 1},
		Engine{Type: kind},
	}
	if set != nil {
		set(&r)
	}
	got := r.Adapt(&r.Request)
	o := outcome{headers: got.Headers, lacks: slices.Collect(got.Unsupported.Names)}
	o.body = string(spliced(t, []byte(body), r.Body.Edits()))
	return o
}

// spliced makes the edits, which must be in order and within the body.
func spliced(t testing.TB, body []byte, edits []rawjson.Edit) (out []byte) {
	t.Helper()
	at := 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(body) {
			t.Fatalf("%s: an edit of %v behind %d", body, e.Span, at)
		}
		out = append(append(out, body[at:e.Start]...), e.Text...)
		at = e.End
	}
	return append(out, body[at:]...)
}

func on(r *asked) { r.Settings.Priority, r.Settings.ThinkingBudget = On, On }

func off(r *asked) { r.Settings.Priority, r.Settings.ThinkingBudget = Off, Off }

func TestAdapt(t *testing.T) {
	const chat, completions, generate, tokens = "/v1/chat/completions", "/v1/completions", "/generate", "/inference/v1/generate"
	long, victims := strings.Repeat("s", 1025), `{"id":"`+SessionID("victim", "", "s")+`"}`
	many := strings.Repeat(`"x":1,`, 256)
	reports := func(info Info) func(*asked) { return func(r *asked) { r.Info = info } }
	salt := func(salt string) func(*asked) { return func(r *asked) { r.Salt = salt } }
	for _, c := range []struct {
		name, kind, path, body, want string
		set                          func(*asked)
		lacks                        string
	}{
		{"nothing", VLLM, chat, `{"messages":[]}`, `{"messages":[]}`, nil, ""},
		{"null", TRTLLM, chat, `{"nvext":null,"messages":[]}`, `{"messages":[]}`, nil, ""},
		{"null, to one that takes it", VLLM, chat, `{"nvext":null,"messages":[]}`, `{"nvext":null,"messages":[]}`, nil, ""},
		{"all of them", VLLM, chat, `{"nvext":1,"a":1,"nvext":2,"nvext":{}}`, `{"a":1}`, nil, ""},
		{"greedy", VLLM, chat, `{"temperature":0.7,"nvext":{"greed_sampling":true}}`, `{"temperature":0}`, nil, ""},
		{"greedy twice", "", completions, `{"temperature":1,"temperature":2,"nvext":{"greed_sampling":true}}`, `{"temperature":0}`, nil, ""},
		{"not greedy", VLLM, chat, `{"temperature":0.7,"nvext":{"greed_sampling":false}}`, `{"temperature":0.7}`, nil, ""},
		{"greedy messages", SGLang, "/v1/messages", `{"nvext":{"greed_sampling":true}}`, `{"temperature":0}`, nil, ""},
		{"greedy embeddings", SGLang, "/v1/embeddings", `{"nvext":{"greed_sampling":true}}`, `{}`, nil, "greed_sampling"},
		{"greedy generate", SGLang, generate, `{"text":"x","nvext":{"greed_sampling":true}}`, `{"text":"x","sampling_params":{"temperature":0}}`, nil, ""},
		{"greedy generate, a list", SGLang, generate, `{"sampling_params":[{"temperature":1},{}],"nvext":{"greed_sampling":true}}`, `{"sampling_params":[{"temperature":1},{}]}`, nil, "greed_sampling"},
		{"greedy generate, nonsense", SGLang, generate, `{"sampling_params":[1],"nvext":{"greed_sampling":true}}`, `{"sampling_params":[1]}`, nil, "greed_sampling"},
		{"priority", VLLM, chat, `{"nvext":{"agent_hints":{"priority":5}}}`, `{"priority":-5}`, on, ""},
		{"priority that is in the body", VLLM, chat, `{"priority":9,"nvext":{"agent_hints":{"priority":-2147483648}}}`, `{"priority":2147483648}`, on, ""},
		{"priority that is off", VLLM, chat, `{"nvext":{"agent_hints":{"priority":5}}}`, `{}`, nil, "agent_hints.priority"},
		{"priority of SGLang", SGLang, chat, `{"nvext":{"agent_hints":{"priority":5}}}`, `{"priority":5}`, reports(Info{Priority: true}), ""},
		{"priority of SGLang as configured", SGLang, completions, `{"nvext":{"agent_hints":{"priority":5}}}`, `{"priority":5}`, on, ""},
		{"priority of SGLang, low first", SGLang, chat, `{"nvext":{"agent_hints":{"priority":5}}}`, `{"priority":-5}`, reports(Info{Priority: true, LowFirst: true}), ""},
		{"priority of SGLang that is off", SGLang, chat, `{"nvext":{"agent_hints":{"priority":5}}}`, `{}`, nil, "agent_hints.priority"},
		{"priority of TensorRT-LLM", TRTLLM, chat, `{"nvext":{"agent_hints":{"priority":1}}}`, `{"priority":0.75}`, on, ""},
		{"priority of TensorRT-LLM, lowest", TRTLLM, completions, `{"nvext":{"agent_hints":{"priority":-1}}}`, `{"priority":0.25}`, on, ""},
		{"priority of TensorRT-LLM that is off", TRTLLM, chat, `{"nvext":{"agent_hints":{"priority":1}}}`, `{}`, nil, "agent_hints.priority"},
		{"priority of llama.cpp", LlamaCpp, chat, `{"nvext":{"agent_hints":{"priority":1}}}`, `{}`, on, "agent_hints.priority"},
		{"retention", SGLang, chat, `{"nvext":{"cache_control":{"ttl":"5m"},"agent_hints":{"priority":5}}}`, `{"priority":5,"retention_seconds":300}`, reports(Info{PriorityEviction: true}), ""},
		{"retention that is unknown", SGLang, chat, `{"nvext":{"cache_control":{"ttl":"5m"}}}`, `{}`, reports(Info{Priority: true}), "cache_control"},
		{"retention of vLLM", VLLM, chat, `{"nvext":{"cache_control":{"ttl":"5m"}}}`, `{}`, on, "cache_control"},
		{"thinking", VLLM, chat, `{"nvext":{"max_thinking_tokens":9}}`, `{"thinking_token_budget":9}`, on, ""},
		{"thinking that is off", VLLM, chat, `{"nvext":{"max_thinking_tokens":9}}`, `{}`, nil, "max_thinking_tokens"},
		{"thinking of tokens", VLLM, tokens, `{"token_ids":[1],"sampling_params":{"n":1},"nvext":{"max_thinking_tokens":9,"greed_sampling":true}}`, `{"token_ids":[1],"sampling_params":{"n":1,"temperature":0,"thinking_token_budget":9}}`, on, ""},
		{"thinking of SGLang", SGLang, chat, `{"custom_params":{"x":1},"nvext":{"max_thinking_tokens":9}}`, `{"custom_params":{"x":1,"thinking_budget":9}}`, reports(Info{StrictThinking: true}), ""},
		{"thinking of SGLang's generate", SGLang, generate, `{"nvext":{"max_thinking_tokens":9,"greed_sampling":true}}`, `{"sampling_params":{"temperature":0,"custom_params":{"thinking_budget":9}}}`, reports(Info{StrictThinking: true}), ""},
		{"thinking of SGLang that is off", SGLang, chat, `{"nvext":{"max_thinking_tokens":9}}`, `{}`, func(r *asked) { r.Info.StrictThinking = true; off(r) }, "max_thinking_tokens"},
		{"thinking of TensorRT-LLM", TRTLLM, completions, `{"nvext":{"max_thinking_tokens":9}}`, `{"thinking_token_budget":9}`, on, ""},
		{"thinking of llama.cpp", LlamaCpp, chat, `{"nvext":{"max_thinking_tokens":9}}`, `{"thinking_budget_tokens":9}`, nil, ""},
		{"thinking of llama.cpp that is off", LlamaCpp, chat, `{"nvext":{"max_thinking_tokens":9}}`, `{}`, off, "max_thinking_tokens"},
		{"tokens", VLLM, completions, `{"prompt":"text","nvext":{"token_data":[1, 2]}}`, `{"prompt":[1, 2]}`, nil, ""},
		{"no tokens", VLLM, completions, `{"prompt":"text","nvext":{"token_data":[]}}`, `{"prompt":"text"}`, nil, ""},
		{"tokens in a chat", VLLM, chat, `{"messages":[],"nvext":{"token_data":[1,2]}}`, `{"messages":[]}`, nil, "token_data"},
		{"tokens of tokens", VLLM, tokens, `{"token_ids":[7],"nvext":{"token_data":[1,2]}}`, `{"token_ids":[1,2]}`, nil, ""},
		{"tokens of SGLang's chat", SGLang, chat, `{"messages":[],"nvext":{"token_data":[1,2]}}`, `{"messages":[],"input_ids":[1,2]}`, nil, ""},
		{"tokens of SGLang's generate", SGLang, generate, `{"text":"x","nvext":{"token_data":[1,2]}}`, `{"input_ids":[1,2]}`, nil, ""},
		{"tokens of TensorRT-LLM's chat", TRTLLM, chat, `{"messages":[],"nvext":{"token_data":[1,2]}}`, `{"messages":[],"prompt_token_ids":[1,2]}`, nil, ""},
		{"tokens of llama.cpp", LlamaCpp, completions, `{"prompt":"x","nvext":{"token_data":[1,2]}}`, `{"prompt":[1,2]}`, nil, ""},
		{"tokens of another one", Other, completions, `{"prompt":"x","nvext":{"token_data":[1,2]}}`, `{"prompt":[1,2]}`, nil, ""},
		{"session", SGLang, chat, `{"session_params":{"id":"a"},"nvext":{"session_params":{"id":"b","offset":-1}}}`, `{"session_params":{"id":"b","offset":-1}}`, nil, ""},
		{"session in completions", SGLang, completions, `{"nvext":{"session_params":{"id":"b"}}}`, `{"session_params":{"id":"b"}}`, nil, ""},
		{"session of vLLM", VLLM, chat, `{"nvext":{"session_params":{"id":"b"}}}`, `{}`, nil, "session_params"},
		{"salt", VLLM, chat, `{"cache_salt":"top","nvext":{"cache_salt":"\u00e9\""}}`, `{"cache_salt":"é\""}`, nil, ""},
		{"tenant", VLLM, chat, `{"nvext":{"cache_salt":"s"}}`, `{"cache_salt":"tenant"}`, func(r *asked) { r.Ext.Tenant = "tenant" }, ""},
		{"salt that is long", VLLM, chat, `{"nvext":{"cache_salt":"` + long + `"}}`, `{"cache_salt":"` + short(long, 1024) + `"}`, nil, ""},
		{"salt that is long, of SGLang", SGLang, chat, `{"nvext":{"cache_salt":"` + long + `"}}`, `{"cache_salt":"` + long + `"}`, nil, ""},
		{"salt beside, of llama.cpp", LlamaCpp, chat, `{"a":1,"cache_salt":"victim","nvext":{"cache_salt":"s"}}`, `{"a":1}`, nil, "cache_salt"},
		{"salt beside, of TensorRT-LLM's completions", TRTLLM, completions, `{"cache_salt":"victim","nvext":{"cache_salt":"s"}}`, `{}`, nil, "cache_salt"},
		{"salt beside, of SGLang's messages", SGLang, "/v1/messages", `{"cache_salt":"victim","nvext":{"cache_salt":"s"}}`, `{}`, nil, "cache_salt"},
		{"salt of vLLM's messages", VLLM, "/v1/messages", `{"cache_salt":"victim","nvext":{"cache_salt":"s"}}`, `{"cache_salt":"s"}`, nil, ""},
		{"salt of vLLM's embeddings", VLLM, "/v1/embeddings", `{"input":"x","nvext":{"cache_salt":"s"}}`, `{"input":"x","cache_salt":"s"}`, nil, ""},
		{"salt without a tenant", LlamaCpp, chat, `{"cache_salt":"own"}`, `{"cache_salt":"own"}`, nil, ""},
		{"salt and SGLang's extra_key", SGLang, chat, `{"extra_key":"k","nvext":{"cache_salt":"s"}}`, `{"extra_key":"` + digest([]byte("s")) + digest([]byte(`"k"`)) + `","cache_salt":"s"}`, nil, ""},
		{"SGLang's extra_key alone", SGLang, chat, `{"extra_key":"k"}`, `{"extra_key":"k"}`, nil, ""},
		{"salt of SGLang's generate", SGLang, generate, `{"text":"x","extra_key":["a"],"nvext":{"cache_salt":"s"}}`, `{"text":"x","extra_key":"` + digest([]byte("s")) + digest([]byte(`["a"]`)) + `","cache_salt":"s"}`, nil, ""},
		{"session of a tenant", SGLang, chat, `{"nvext":{"cache_salt":"t","session_params":{"rid":"r" , "id":"\u0073","offset":1}}}`, `{"session_params":{"rid":"r" , "id":"` + SessionID("t", "", `\u0073`) + `","offset":1},"cache_salt":"t"}`, salt("t"), ""},
		{"session of a salt beside", SGLang, chat, `{"cache_salt":"t","session_id":"s","session_params":{"id":"s","rid":"r"}}`, `{"cache_salt":"t","session_id":"` + SessionID("t", "", "s") + `","session_params":{"id":"` + SessionID("t", "", "s") + `","rid":"r"}}`, salt("t"), ""},
		{"session that is scoped already", SGLang, chat, `{"session_id":"` + SessionID("t", "", "s") + `"}`, `{"session_id":"` + SessionID("t", "", "s") + `"}`, salt("t"), ""},
		{"session of another one's scope", SGLang, chat, `{"session_id":"` + SessionID("u", "", "s") + `"}`, `{"session_id":"` + SessionID("t", "", SessionID("u", "", "s")) + `"}`, salt("t"), ""},
		{"another tenant's session", SGLang, generate, `{"session_params":` + victims + `}`, `{"session_params":{"id":"` + SessionID("t", "", SessionID("victim", "", "s")) + `"}}`, salt("t"), ""},
		{"another tenant's session, without a salt", SGLang, generate, `{"session_params":[` + victims + `]}`, `{"session_params":[` + victims + `]}`, nil, ""},
		{"another tenant's session behind another id", SGLang, generate, `{"session_params":{"id":"victims","id":"s"}}`, `{"session_params":{"id":"` + SessionID("t", "", "s") + `"}}`, salt("t"), ""},
		{"another tenant's session behind null", SGLang, generate, `{"session_params":{"id":"victims","id":null}}`, `{"session_params":{}}`, salt("t"), ""},
		{"another tenant's session in a list", SGLang, generate, `{"session_params":[` + victims + `,null]}`, `{}`, salt("t"), "session_params"},
		{"another tenant's session in a list, in a chat", SGLang, chat, `{"session_params":[` + victims + `]}`, `{}`, salt("t"), "session_params"},
		{"another tenant's session in a list, elsewhere", SGLang, "/v1/anything", `{"session_params":[` + victims + `],"text":"x"}`, `{"text":"x"}`, salt("t"), "session_params"},
		{"another tenant's session as a text", SGLang, generate, `{"session_params":"victims"}`, `{}`, salt("t"), "session_params"},
		{"another tenant's session, a list as a name", SGLang, generate, `{"session_params":{"id":["victims"]}}`, `{}`, salt("t"), "session_params"},
		{"session without a name", SGLang, generate, `{"session_params":{"id":""}}`, `{"session_params":{"id":"` + SessionID("t", "", "x")[:33] + `"}}`, salt("t"), ""},
		{"session without an id", SGLang, generate, `{"session_params":{"rid":"r"}}`, `{"session_params":{"rid":"r"}}`, salt("t"), ""},
		{"session_id beside the router's own session_params, which SGLang refuses", SGLang, generate, `{"text":"x","session_id":"a"}`, `{"text":"x","session_params":{"id":"s"}}`, func(r *asked) { r.Session = "s" }, ""},
		{"session_params of nvext that is too long", SGLang, generate, `{"session_params":` + victims + `,"nvext":{"session_params":{"id":"s"` + strings.Repeat(" ", maxParams) + `}}}`, `{}`, salt("t"), "session_params"},
		{"own priority", VLLM, chat, `{"priority":-9}`, `{}`, func(r *asked) { on(r); r.Grants = 0 }, ""},
		{"own priority that is granted", VLLM, chat, `{"priority":-9}`, `{"priority":-9}`, on, ""},
		{"own priority of an engine without priorities", VLLM, chat, `{"priority":-9}`, `{"priority":-9}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own priority in place of which the router's is", VLLM, chat, `{"priority":-9,"nvext":{"agent_hints":{"priority":-5}}}`, `{"priority":5}`, func(r *asked) { on(r); r.Grants = 0 }, ""},
		{"own priority of SGLang's embeddings", SGLang, "/v1/embeddings", `{"priority":9,"input":"x"}`, `{"input":"x"}`, func(r *asked) { r.Info.Priority, r.Grants = true, 0 }, ""},
		{"own rank where one is known", SGLang, chat, `{"routed_dp_rank":3,"a":1,"data_parallel_rank":null}`, `{"a":1,"data_parallel_rank":null}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own rank that is granted", SGLang, chat, `{"routed_dp_rank":3}`, `{"routed_dp_rank":3}`, nil, ""},
		{"own priority before a null", VLLM, chat, `{"priority":-9,"a":1,"priority":null}`, `{"a":1}`, func(r *asked) { on(r); r.Grants = 0 }, ""},
		{"own slot", LlamaCpp, chat, `{"id_slot":0,"messages":[]}`, `{"messages":[]}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own transfer in the sampling parameters", VLLM, tokens, `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":{}}}}`, `{"token_ids":[1],"sampling_params":{"n":1,"extra_args":{}}}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own transfer that is granted", VLLM, tokens, `{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}`, `{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}`, nil, ""},
		{"own transfer among many parameters", VLLM, tokens, `{"token_ids":[1],"sampling_params":{` + many + `"extra_args":{"kv_transfer_params":{}}}}`, `{"token_ids":[1]}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own transfer among many arguments", VLLM, tokens, `{"sampling_params":{"n":1,"extra_args":{` + many + `"kv_transfer_params":{}}}}`, `{"sampling_params":{"n":1}}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own transfer in vLLM's further arguments", VLLM, chat, `{"vllm_xargs":{"a":1,"kv_transfer_params":"x"}}`, `{"vllm_xargs":{"a":1}}`, func(r *asked) { r.Grants = 0 }, ""},
		{"own retention", SGLang, chat, `{"retention_seconds":9,"priority":1}`, `{}`, func(r *asked) { r.Info.PriorityEviction, r.Grants = true, 0 }, ""},
		{"salt of TensorRT-LLM", TRTLLM, chat, `{"nvext":{"cache_salt":"s"}}`, `{"cache_salt":"s"}`, nil, ""},
		{"salt of TensorRT-LLM's completions", TRTLLM, completions, `{"nvext":{"cache_salt":"s"}}`, `{}`, nil, "cache_salt"},
		{"salt of llama.cpp", LlamaCpp, chat, `{"nvext":{"cache_salt":"s"}}`, `{}`, nil, "cache_salt"},
		{"salt of an unknown one", "", chat, `{"nvext":{"cache_salt":"s"}}`, `{"cache_salt":"s"}`, nil, ""},
		{"what no engine accepts", VLLM, chat, `{"nvext":{"use_raw_prompt":true,"metadata_upload":{"url":"u"},"router":{"ttft_target":1},"agent_hints":{"osl":5,"speculative_prefill":true}}}`, `{}`, on, "use_raw_prompt metadata_upload"},
		{"rank of SGLang", SGLang, chat, `{"routed_dp_rank":7,"a":1,"data_parallel_rank":7}`, `{"routed_dp_rank":1,"a":1}`, func(r *asked) {
			r.Rank, r.Ranks, r.Info.Version = 1, 2, "0.5.10"
		}, ""},
		{"rank of an old SGLang", SGLang, chat, `{"data_parallel_rank":7,"a":1}`, `{"data_parallel_rank":1,"a":1,"routed_dp_rank":1}`, func(r *asked) {
			r.Rank, r.Ranks, r.Info.Version = 1, 2, "0.5.9"
		}, ""},
		{
			"Dynamo", Dynamo, chat, `{"nvext":{"a":1},"temperature":1,"nvext":{"greed_sampling":true,"cache_control":{},"dp_rank":1}}`,
			`{"temperature":1,"nvext":{"greed_sampling":true}}`, nil, "",
		},
		{"Dynamo without grants", Dynamo, chat, `{"nvext":{"agent_hints":{"priority":1,"osl":2}}}`, `{"nvext":{"agent_hints":{"osl":2}}}`, func(r *asked) { r.Grants = 0 }, ""},
	} {
		got := adapted(t, c.kind, c.path, c.body, c.set)
		if got.body != c.want || strings.Join(got.lacks, " ") != c.lacks {
			t.Errorf("%s: %.999s became %.999s without %v, want %s without %q", c.name, c.body, got.body, got.lacks, c.want, c.lacks)
		}
	}
}

func TestAdaptHeaders(t *testing.T) {
	two := func(r *asked) { r.Rank, r.Ranks = 1, 2 }
	pinned := func(r *asked) { r.Settings.DynamoInstance = 9 }
	salted := func(r *asked) { r.Salt = "t" }
	sent := func(headers ...string) func(*asked) {
		return func(r *asked) {
			salted(r)
			r.Sent = make(map[string][]string)
			for i := 0; i < len(headers); i += 2 {
				r.Sent[headers[i]] = []string{headers[i+1], "second"}
			}
		}
	}
	scoped := func(id string) string { return short(SessionID("t", "", id), 0) }
	session := func(value string) []Header { return []Header{{nvext.HeaderSession, value, true}} }
	for _, c := range []struct {
		kind, ext string
		set       func(*asked)
		want      []Header
	}{
		{VLLM, `{}`, nil, nil},
		{VLLM, `{"session_control":{"session_id":"s"},"backend_instance_id":1}`, nil, nil},
		{VLLM, `{}`, two, []Header{{Name: "X-Data-Parallel-Rank", Value: "1"}}},
		{"", `{}`, two, []Header{{Name: "X-Data-Parallel-Rank", Value: "1"}}},
		{SGLang, `{}`, two, []Header{{Name: "X-Data-Parallel-Rank", Value: "1"}}},
		{Dynamo, `{}`, nil, nil},
		{Dynamo, `{"session_control":{"session_id":"s"},"session_params":{"id":"t"}}`, nil, session("s")},
		{Dynamo, `{"session_params":{"id":"t"}}`, nil, session("t")},
		{Dynamo, `{"session_params":{"id":"a b"}}`, nil, session(short("a b", 0))},
		{Dynamo, `{"session_params":{"id":"` + strings.Repeat("x", 257) + `"}}`, nil, session(short(strings.Repeat("x", 257), 0))},
		{Dynamo, `{"backend_instance_id":1,"dp_rank":2}`, nil, nil},
		{Dynamo, `{"backend_instance_id":1,"dp_rank":2}`, pinned, []Header{{Name: "X-Dynamo-Worker-Instance-Id", Value: "9"}, {Name: "X-Dynamo-Dp-Rank", Value: "2"}}},
		{Dynamo, `{"decode_worker_id":1}`, pinned, []Header{{Name: "X-Dynamo-Worker-Instance-Id", Value: "9"}}},
		{Dynamo, `{"dp_rank":2}`, pinned, nil},
		{Dynamo, `{"session_params":{"id":"s"}}`, salted, []Header{{nvext.HeaderSession, scoped("s"), true}}},
		{Dynamo, `{}`, sent(nvext.HeaderSession, " s ", "X-Dynamo-Parent-Session-Id", "p", "X-Session-Id", "s", "Authorization", "s"), []Header{
			{Name: nvext.HeaderSession, Value: scoped("s")}, {Name: "X-Dynamo-Parent-Session-Id", Value: scoped("p")}, {Name: "X-Session-Id", Value: scoped("s")},
		}},
		{Dynamo, `{}`, func(r *asked) { sent("X-Session-Id", "s")(r); r.Salt = "" }, nil},
		{Dynamo, `{}`, sent("X-Session-Id", " "), nil},
		{VLLM, `{}`, sent("X-Session-Id", "s"), nil},
	} {
		got := adapted(t, c.kind, paths[0], `{"nvext":`+c.ext+`}`, c.set).headers
		if !slices.Equal(got, c.want) {
			t.Errorf("%s, %s: %v, want %v", c.kind, c.ext, got, c.want)
		}
	}
}

func TestSwitch(t *testing.T) {
	for s, want := range map[Switch][3]bool{ // known; on if the engine reports nothing, if it reports yes
		"": {true, false, true}, Auto: {true, false, true}, On: {true, true, true}, Off: {true, false, false}, "true": {},
	} {
		if got := [3]bool{s.Known(), s.Known() && s.or(false), s.Known() && s.or(true)}; got != want {
			t.Errorf("%q: %v, want %v", s, got, want)
		}
	}
}

const fuzzed = `{"model":"m","messages":[{"role":"user","content":"hi"}],"prompt":"x","text":"y","temperature":1,"sampling_params":{"temperature":1,"custom_params":null},` +
	`"custom_params":{"a":1},"priority":1,"cache_salt":"a","nvext":{"greed_sampling":true,"use_raw_prompt":true,"token_data":[1,2,3],"max_thinking_tokens":5,` +
	`"session_params":{"id":"s"},"session_control":{"session_id":"s"},"cache_control":{"ttl":60},"cache_salt":"b","agent_hints":{"priority":2,"osl":1},` +
	`"metadata_upload":{"url":"u"},"backend_instance_id":1,"dp_rank":0,"zzz":1}}`

func TestWhatPathsMean(t *testing.T) {
	for _, v := range []struct {
		path                 string
		all, vllm, sglang    bool
		keepsID, keepsAsName bool
	}{
		{"/flush_cache", true, false, true, true, false},
		{"/v1/load_lora_adapter", true, true, true, true, false},
		{"/load_lora_adapter/", true, true, true, true, false},
		{"/sleep", true, true, false, true, false},
		{"/v1/videos/x/pause", false, false, false, true, false},
		{"/init_weights_update_group", false, false, false, true, false},
		{"/v1/videos", false, false, false, true, false},
		{"/v1/audio/voices", false, false, false, true, true},
		{"/v1/images/generations", false, false, false, true, false},
		{"/invocations", false, false, false, false, false},
		{"/v1/chat/completions/batch", false, false, false, false, false},
		{"/encode", false, false, false, false, false},
	} {
		if got := MeansAll(v.path); got != v.all {
			t.Errorf("%s means all: %v", v.path, got)
		}
		for kind, want := range map[string]bool{VLLM: v.vllm, SGLang: v.sglang, Other: true, "": true, LlamaCpp: false} {
			if got := (&Engine{Type: kind}).Means(v.path); got != want {
				t.Errorf("%s means %s: %v", v.path, kind, got)
			}
		}
		id, name := Kept(v.path, "job_id", "job_1"), Kept(v.path, "name", "bob")
		if (id == "job_1") != v.keepsID || (name == Voice("bob")) != v.keepsAsName || Kept(v.path, "object", "job_1")+Kept(v.path, "id", "videos") != "" {
			t.Errorf("%s: id %q, name %q", v.path, id, name)
		}
	}
}
