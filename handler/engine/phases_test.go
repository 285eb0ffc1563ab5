package engine

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestPhases reads what each engine gets of each phase.
func TestPhases(t *testing.T) {
	const room = `"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":7`
	prefill, decode := &Phase{Prefill: true, ID: "kvr-1", Room: 7, Host: "h", Port: 8998, Rank: 1, Ranks: 2}, &Phase{}
	*decode = *prefill
	decode.Prefill, decode.TransferParams = false, []byte(`{"do_remote_prefill":true}`)
	mooncake := new(Phase)
	*mooncake = *prefill
	mooncake.Remote = "e"
	ids := new(Phase)
	*ids = *decode
	ids.Prompt = []byte("[1,2]")
	for name, v := range map[string]struct {
		kind, path, body string
		phase            *Phase
		want             string
	}{
		"vLLM chat, prefill": {
			VLLM, "/v1/chat/completions", `{"messages":[],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"max_completion_tokens":8,"min_tokens":3}`, prefill,
			`{"messages":[],"stream":false,"max_tokens":1,"max_completion_tokens":1,"min_tokens":1,"kv_transfer_params":` + remoteDecode + `}`,
		},
		"vLLM completions, prefill": {
			VLLM, "/v1/completions", `{"prompt":"x"}`, prefill,
			`{"prompt":"x","stream":false,"kv_transfer_params":` + remoteDecode + `,"max_tokens":1}`,
		},
		"vLLM responses, prefill": {
			VLLM, "/v1/responses", `{"input":"x","background":true}`, prefill,
			`{"input":"x","request_id":"resp_kvr-1","stream":false,"kv_transfer_params":` + remoteDecode + `,"max_output_tokens":1,"store":false}`,
		},
		"vLLM token ids, prefill": {
			VLLM, "/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"max_tokens":5,"min_tokens":2}}`, prefill,
			`{"token_ids":[1],"sampling_params":{"max_tokens":1,"min_tokens":1},"stream":false,"kv_transfer_params":` + remoteDecode + `}`,
		},
		"vLLM with Mooncake, prefill": {
			VLLM, "/v1/completions", `{"prompt":"x"}`, mooncake,
			`{"prompt":"x","stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"kvr-1"},"max_tokens":1}`,
		},
		"vLLM, decode, in place of the client's": {
			VLLM, "/v1/chat/completions", `{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"},"messages":[],"stream":true}`, decode,
			`{"kv_transfer_params":{"do_remote_prefill":true},"messages":[],"stream":true}`,
		},
		"SGLang, prefill": {
			SGLang, "/v1/chat/completions", `{"messages":[],"stream":true,"rid":"mine","stream_options":{}}`, prefill,
			`{"messages":[],"stream":false,"rid":"kvr-1",` + room + `}`,
		},
		"SGLang, decode": {
			SGLang, "/generate", `{"text":"x","bootstrap_room":1,"stream":true}`, decode,
			`{"text":"x","bootstrap_room":7,"stream":true,"bootstrap_host":"h","bootstrap_port":8998,"rid":"kvr-1","disagg_prefill_dp_rank":1}`,
		},
		"SGLang responses": {
			SGLang, "/v1/responses", `{"input":"x"}`, prefill, `{"input":"x","stream":false,` + room + `}`,
		},
		"TensorRT-LLM, prefill": {
			TRTLLM, "/v1/chat/completions", `{"messages":[],"stream":true,"stream_options":{},"max_tokens":9,"disaggregated_params":{"request_type":"evil"}}`, prefill,
			`{"messages":[],"stream":false,"max_tokens":9,"disaggregated_params":{"request_type":"context_only","disagg_request_id":7}}`,
		},
		"TensorRT-LLM, decode": {
			TRTLLM, "/v1/chat/completions", `{"messages":[],"stream":true}`, decode,
			`{"messages":[],"stream":true,"disaggregated_params":{"do_remote_prefill":true}}`,
		},
		"TensorRT-LLM, decode with ids, in place of the prompt": {
			TRTLLM, "/v1/chat/completions", `{"messages":[],"prompt_token_ids":[9]}`, ids,
			`{"messages":[],"prompt_token_ids":[1,2],"disaggregated_params":{"do_remote_prefill":true}}`,
		},
		"TensorRT-LLM, decode with the client's ids": {
			TRTLLM, "/v1/chat/completions", `{"messages":[],"nvext":{"token_data":[9]}}`, ids,
			`{"messages":[],"prompt_token_ids":[9],"disaggregated_params":{"do_remote_prefill":true}}`,
		},
		"TensorRT-LLM completions, decode": {
			TRTLLM, "/v1/completions", `{"prompt":"x"}`, ids, `{"prompt":[1,2],"disaggregated_params":{"do_remote_prefill":true}}`,
		},
		"whole, untrusted": {VLLM, "/v1/completions", `{"kv_transfer_params":{"remote_host":"evil"},"prompt":"x"}`, nil, `{"prompt":"x"}`},
		"whole on SGLang":  {SGLang, "/generate", `{"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":[1],"text":"x"}`, nil, `{"text":"x"}`},
		"whole on TRT":     {TRTLLM, "/v1/completions", `{"prompt":"x","disaggregated_params":{"request_type":"context_only"}}`, nil, `{"prompt":"x"}`},
	} {
		got := adapted(t, v.kind, v.path, v.body, func(a *asked) { a.Phase, a.Grants = v.phase, 0 })
		if got.body != v.want {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got.body, v.want)
		}
	}
	const own = `{"kv_transfer_params":{"remote_host":"peer"},"prompt":"x"}`
	if got := adapted(t, VLLM, "/v1/completions", own, func(a *asked) { a.Grants = nvext.Pins }); got.body != own {
		t.Errorf("a trusted client's own transfer is gone: %s", got.body)
	}
}

// TestReadTransfer reads answers to prefill phases.
func TestReadTransfer(t *testing.T) {
	for _, v := range []struct {
		kind, answer string
		means        PrefillResult
		want, prompt string // of the decode phase; want is the answer if that is over
	}{
		{VLLM, `{"choices":[],"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"a","remote_port":1}}`, Transferable, `{"do_remote_prefill":true,"remote_host":"a","remote_port":1}`, ""},
		{VLLM, `{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":null}}`, Transferable, `{"do_remote_prefill":true,"remote_host":"h"}`, ""},
		{VLLM, `{"kv_transfer_params":{"do_remote_prefill":true}}`, Transferable, `{"do_remote_prefill":true,"remote_host":"h"}`, ""},
		{VLLM, `{"kv_transfer_params":{"do_remote_prefill":false,"remote_host":"a"}}`, NoTransfer, "", ""},
		{VLLM, `{"kv_transfer_params":null}`, NoTransfer, "", ""},
		{VLLM, `{"kv_transfer_params":[1]}`, NoTransfer, "", ""},
		{VLLM, `{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":null}`, AnswerEnded, `{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":null}`, ""},
		{VLLM, `{"type":"message","stop_reason":"end_turn"}`, AnswerEnded, `{"type":"message","stop_reason":"end_turn"}`, ""},
		{VLLM, `{"type":"message","stop_reason":"max_tokens"}`, NoTransfer, "", ""},
		{VLLM, `{"object":"response","status":"completed"}`, AnswerEnded, "", ""},
		{VLLM, `{"object":"response","status":"incomplete"}`, NoTransfer, "", ""},
		{VLLM, `{}`, NoTransfer, "", ""},
		{VLLM, `no JSON`, NoTransfer, "", ""},
		{VLLM, ``, NoTransfer, "", ""},
		{SGLang, `anything`, Transferable, "", ""},
		{LlamaCpp, `{}`, NoTransfer, "", ""},
		{
			TRTLLM, `{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":5,"encoded_opaque_state":"x","draft_tokens":null}}],"prompt_token_ids":[1, 2]}`,
			Transferable, `{"request_type":"generation_only","ctx_request_id":5,"encoded_opaque_state":"x","draft_tokens":null,"disagg_request_id":7}`, "[1, 2]",
		},
		{
			TRTLLM, `{"choices":[{"finish_reason":"not_finished","disaggregated_params":{"request_type":"context_only","disagg_request_id":7,"ctx_request_id":5,"ctx_usage":null}}],"usage":{"prompt_tokens":2},"prompt_token_ids":["garbage"]}`,
			Transferable, `{"request_type":"generation_only","disagg_request_id":7,"ctx_request_id":5,"ctx_usage":{"prompt_tokens":2}}`, "",
		},
		{
			TRTLLM, `{"choices":[{"text":"no","finish_reason":"stop","disaggregated_params":{"ctx_request_id":5}}],"prompt_token_ids_b64":"AQ==","prompt_token_ids":[1]}`,
			AnswerEnded, `{"choices":[{"text":"no","finish_reason":"stop","disaggregated_params":null}],"prompt_token_ids_b64":null,"prompt_token_ids":null}`, "",
		},
		{TRTLLM, `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":"garbage"}}]}`, NoTransfer, "", ""},
		{TRTLLM, `{"choices":[{"finish_reason":"length"}]}`, NoTransfer, "", ""},
		{TRTLLM, `{"choices":[{"finish_reason":"length","disaggregated_params":null}]}`, NoTransfer, "", ""},
		{TRTLLM, `{"choices":[{"finish_reason":"cancelled","disaggregated_params":{"ctx_request_id":5}}]}`, NoTransfer, "", ""},
		{TRTLLM, `no JSON`, NoTransfer, "", ""},
	} {
		l := &Phase{Host: "h", Room: 7}
		means := (&Engine{Type: v.kind}).ReadTransfer([]byte(v.answer), l)
		if got := string(l.TransferParams) + string(l.Answer); means != v.means || got != v.want || string(l.Prompt) != v.prompt {
			t.Errorf("%s %s: %v, %s, %s", v.kind, v.answer, means, got, l.Prompt)
		}
	}
}

// TestMooncake transfers prompts by the names that a bootstrap server gave.
func TestMooncake(t *testing.T) {
	for body, want := range map[string]string{
		`{"0":{"engine_id":"a","worker_addr":{"0":{"0":"tcp://h:1"}}},"1":{"engine_id":"b"}}`: "a\nb",

		`{"0":{"engine_id":"a"},"2":{"engine_id":"c"}}`:   "",
		`{"0":{"engine_id":"a"}}`:                         "",
		`{"0":{"engine_id":"a\n"},"1":{"engine_id":"b"}}`: "",
		`{"0":{"engine_id":7},"1":{"engine_id":"b"}}`:     "",
		`["a"]`: "",
	} {
		if got := MooncakeIDs([]byte(body), 2); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	e := &Engine{Type: VLLM, Settings: Settings{MooncakePort: 8990}, Info: Info{MooncakeIDs: "a\nb"}}
	if e.Splits(api.NameResponses) || !e.Splits(api.NameChat) { // where vLLM chooses the rank
		t.Error("the router must choose the rank that computes the prompt")
	}
	for answer, means := range map[string]PrefillResult{
		`{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}`: Transferable,
		`{"choices":[{"finish_reason":"stop"}]}`:                             AnswerEnded,
		`{"choices":[{"finish_reason":"abort"}]}`:                            NoTransfer,
		`{"type":"message","stop_reason":"max_tokens"}`:                      Transferable,
		`{"object":"response","status":"incomplete"}`:                        Transferable,
	} {
		l := &Phase{ID: "kvr-1", Host: "fd00::1", Rank: 1}
		e.Meet(l)
		got := e.ReadTransfer([]byte(answer), l)
		if want := `{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"kvr-1","remote_engine_id":"b",` +
			`"remote_bootstrap_addr":"http://[fd00::1]:8990"}`; got != means || got == Transferable && string(l.TransferParams) != want {
			t.Errorf("%s: %v, %s", answer, got, l.TransferParams)
		}
	}
	if e.Info.MooncakeIDs = ""; e.CanTransfer() {
		t.Error("no bootstrap server, and the engine prefills for others")
	}
}

// TestPhasesShareAnID reads the id by which a vLLM that pushes joins the phases.
func TestPhasesShareAnID(t *testing.T) {
	for _, v := range []struct{ client, want string }{{"", "kvr-1"}, {"mine", "mine-kvr-1"}, {"a, b", "kvr-1"}} {
		for _, phase := range []*Phase{{Prefill: true, ID: "kvr-1"}, {ID: "kvr-1", TransferParams: []byte("{}")}} {
			got := adapted(t, VLLM, "/v1/chat/completions", `{"messages":[]}`, func(a *asked) {
				a.Phase, a.Sent = phase, map[string][]string{"X-Request-Id": {v.client}}
			})
			if len(got.headers) != 1 || got.headers[0].Name != "X-Request-Id" || got.headers[0].Value != v.want {
				t.Errorf("prefill %v: %+v", phase.Prefill, got.headers)
			}
		}
	}
}

// TestPairs pairs engines for phases.
func TestPairs(t *testing.T) {
	of := func(kind, version string) *Engine { return &Engine{Type: kind, Info: Info{Version: version}} }
	for _, v := range []struct {
		prefill, decode *Engine
		name            string
		want            bool
	}{
		{of(VLLM, "0.32.0"), of(VLLM, "0.32.0"), api.NameChat, true},
		{of(VLLM, "0.32.0"), of(VLLM, "0.33.0"), api.NameChat, false},
		{of(VLLM, "0.32.0"), of(VLLM, "0.32.0"), api.NameEmbeddings, false},
		{of(SGLang, "1"), of(SGLang, "1"), api.NameMessages, false}, // SGLang's has no members for it
		{of(SGLang, "1"), of(VLLM, "1"), api.NameChat, false},
		{of(TRTLLM, "1.2"), of(TRTLLM, "1.2"), api.NameCompletions, true},
		{of(TRTLLM, "1.2"), of(TRTLLM, "1.2"), api.NameResponses, false},
		{of(LlamaCpp, ""), of(LlamaCpp, ""), api.NameChat, false},
		{of("", ""), of("", ""), api.NameChat, false},
	} {
		if got := v.prefill.Pairs(v.decode, v.name); got != v.want {
			t.Errorf("%s %s and %s %s in %s: %v", v.prefill.Type, v.prefill.Info.Version, v.decode.Type, v.decode.Info.Version, v.name, got)
		}
	}
}

// TestRoles finds out the role of engines, and whether these serve whole requests.
func TestRoles(t *testing.T) {
	for _, v := range []struct {
		kind      string
		set, told Role
		role      Role
		whole     bool
	}{
		{VLLM, "", "", RoleBoth, true},
		{VLLM, RoleDecode, "", RoleDecode, true},
		{SGLang, "", RoleDecode, RoleDecode, false},
		{SGLang, RoleBoth, RoleDecode, RoleBoth, true}, // the operator knows better
		{SGLang, RolePrefill, "", RolePrefill, false},
		{Other, RolePrefill, "", RolePrefill, true},
	} {
		e := &Engine{Type: v.kind, Settings: Settings{Role: v.set}, Info: Info{Role: v.told}}
		if e.Role() != v.role || e.ServesWhole() != v.whole {
			t.Errorf("%+v: role %s, whole %v", v, e.Role(), e.ServesWhole())
		}
	}
	if path, body := (&Engine{Type: SGLang}).Abort("kvr-1"); path != "/abort_request" || !strings.Contains(string(body), `"kvr-1"`) {
		t.Errorf("abort: %s %s", path, body)
	}
}

// FuzzReadTransfer reads any answer to a prefill phase. What the decode engine and the client get of it is JSON.
func FuzzReadTransfer(f *testing.F) {
	f.Add([]byte(`{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":null,"x":[1,{"y":"z"}]}}`))
	f.Add([]byte(`{"kv_transfer_params":{"do_remote_prefill":true`))
	f.Add([]byte(`{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":5,"ctx_usage":null}}],"usage":{},"prompt_token_ids":[[1,2]]}`))
	f.Add([]byte(`{"prompt_token_ids":[1],"choices":[{"disaggregated_params":{"a":1},"finish_reason":"stop"}]}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		for _, kind := range []string{VLLM, TRTLLM} {
			l := &Phase{Host: "h\"", Remote: MooncakeIDs(answer, 1)}
			means := (&Engine{Type: kind}).ReadTransfer(answer, l)
			for _, out := range [][]byte{l.TransferParams, l.Answer, l.Prompt} {
				if out != nil && !json.Valid(out) || means == NoTransfer && l.Answer != nil {
					t.Errorf("%s: %q gives %q", kind, answer, out)
				}
			}
		}
	})
}
