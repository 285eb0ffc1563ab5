package engine

import (
	"bytes"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// trtllmPhases are TensorRT-LLM's with its context first (tensorrt_llm/serve/openai_disagg_service.py).
// The answer to the context_only phase says where the prompt is, and the decode engine fetches it.
// To cancel that phase is safe. To cancel a transfer can wedge both engines, which end it themselves
// after kv_transfer_timeout_ms, 60 s by default.
var trtllmPhases = Phases{
	apis:  []string{api.NameChat, api.NameCompletions},
	whole: true, TransferTimeout: 70 * time.Second, CancelUnsafe: true, TextOnly: true,
	prefill: (*adapter).trtllmPrefill, decode: (*adapter).trtllmDecode, readTransfer: readTRTLLMTransfer,
}

const (
	nameDisaggregated = "disaggregated_params"
	nameIDs           = "prompt_token_ids"
	nameIDsBase64     = nameIDs + "_b64"
	pathFinish        = "choices.0.finish_reason"
	pathDisaggregated = "choices.0." + nameDisaggregated
)

// trtllmPrefill asks for the context alone. The engine then makes one token, whatever the request
// allows. It takes the first token from this phase, so min_tokens stays.
func (f *adapter) trtllmPrefill() {
	f.Body.Set("stream", []byte("false"))
	f.Body.Cut("stream_options")
	params := strconv.AppendUint([]byte(`{"request_type":"context_only","disagg_request_id":`), f.Phase.Room, 10)
	f.Body.Set(nameDisaggregated, append(params, '}'))
}

// trtllmDecode also gives the engine the prompt's token ids, so that both engines see one prompt.
func (f *adapter) trtllmDecode() {
	f.Body.Set(nameDisaggregated, f.Phase.TransferParams)
	switch ids := f.Phase.Prompt; {
	case ids == nil, f.Ext.TokenCount > 0: // the engine has them from the client
	case f.on(api.NameChat):
		f.Body.Set(nameIDs, ids)
	case f.on(api.NameCompletions):
		f.Body.Set("prompt", ids)
	}
}

// readTRTLLMTransfer takes disaggregated_params and the prompt's token ids from the answer.
func readTRTLLMTransfer(answer []byte, l *Phase) PrefillResult {
	if !gjson.ValidBytes(answer) {
		return NoTransfer
	}
	params, ids := gjson.GetBytes(answer, pathDisaggregated), gjson.GetBytes(answer, nameIDs)
	switch gjson.GetBytes(answer, pathFinish).Str {
	case "length", "not_finished":
	case "stop":
		return l.over(nulled(answer, params, ids, gjson.GetBytes(answer, nameIDsBase64)))
	default:
		return NoTransfer
	}
	if !params.IsObject() || params.Get("ctx_request_id").Type != gjson.Number {
		return NoTransfer
	}
	e := rawjson.EditObject([]byte(params.Raw))
	if e == nil {
		return NoTransfer // too many members
	}
	e.Set("request_type", []byte(`"generation_only"`))
	e.Set("disagg_request_id", strconv.AppendUint(nil, l.Room, 10))
	if usage := gjson.GetBytes(answer, "usage"); usage.IsObject() && e.Value("ctx_usage") != nil { // not in older versions
		e.Set("ctx_usage", []byte(usage.Raw))
	}
	l.TransferParams = e.Apply()
	if ids.IsArray() && ids.Raw != "[]" && len(bytes.Trim([]byte(ids.Raw), "[]0123456789, ")) == 0 {
		l.Prompt = []byte(ids.Raw)
	}
	return Transferable
}

// nulled replaces values of the answer, which the client did not ask for, by null.
func nulled(answer []byte, values ...gjson.Result) []byte {
	slices.SortFunc(values, func(a, b gjson.Result) int { return b.Index - a.Index }) // from the last
	for _, v := range values {
		if v.Index > 0 {
			answer = slices.Concat(answer[:v.Index], []byte("null"), answer[v.Index+len(v.Raw):])
		}
	}
	return answer
}
