package engine

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/tidwall/gjson"
)

// vllmLegs are vLLM's with the NIXL connector that pulls
// (vllm/distributed/kv_transfer/kv_connector/v1/nixl). The answer to the prefill leg says where
// the prompt's blocks are, and the decode engine fetches them. The prefill engine keeps them for 30 s,
// and longer while the decode engine says that it still needs them. Either leg may be canceled
// at any time. If the decode engine cannot fetch the blocks, it answers with 500.
var vllmLegs = legs{
	apis:  []string{api.NameChat, api.NameCompletions, api.NameMessages, api.NameResponses, api.NameTokens},
	whole: true, keeps: 25 * time.Second, fetches: 30 * time.Second,
	prefill: (*adapter).vllmPrefill, decode: (*adapter).vllmDecode, handed: vllmHanded,
}

const nameTransfer = "kv_transfer_params"

// toHandOver asks vLLM to keep the prompt's blocks for another engine.
const toHandOver = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// vllmPrefill asks for one token, in a plain answer that the engine does not store.
func (f *adapter) vllmPrefill() {
	b, one := f.Body, []byte{'1'}
	b.Set("stream", []byte("false"))
	b.Cut("stream_options")
	b.Set(nameTransfer, []byte(toHandOver))
	switch f.API {
	case api.NameResponses:
		b.Set("max_output_tokens", one)
		b.Set("store", []byte("false"))
		b.Cut("background")
		return
	case api.NameTokens:
		in, ok := b.Object(nameSampling)
		if !ok {
			return // the engine refuses it
		}
		b = in
	case api.NameChat:
		if b.Value("max_completion_tokens") != nil {
			b.Set("max_completion_tokens", one)
		}
	}
	b.Set("max_tokens", one)
	if least := b.Value("min_tokens"); !isNull(least) && string(least) != "0" {
		b.Set("min_tokens", one) // the first token must not end the answer
	}
}

func (f *adapter) vllmDecode() { f.Body.Set(nameTransfer, f.Leg.Handed) }

// vllmHanded takes kv_transfer_params from the answer. An engine without a connector has none, and
// neither has an answer that ended with its first token.
func vllmHanded(answer []byte, l *Leg) Handover {
	if !gjson.ValidBytes(answer) {
		return NotHanded
	}
	params := gjson.GetBytes(answer, nameTransfer)
	stop := gjson.GetBytes(answer, "stop_reason").Str // of messages
	switch {
	case params.IsObject() && params.Get("do_remote_prefill").Bool():
	case gjson.GetBytes(answer, pathFinish).Str == "stop", stop == "end_turn", stop == "stop_sequence":
		return l.over(answer)
	case gjson.GetBytes(answer, "status").Str == "completed":
		return Over // a response, which this engine does not store
	default:
		return NotHanded
	}
	l.Handed = []byte(params.Raw)
	if params.Get("remote_host").Type == gjson.Null {
		e := api.EditObject(l.Handed)
		if e == nil {
			return NotHanded
		}
		e.Set("remote_host", quoted(l.Host))
		l.Handed = e.Apply()
	}
	return HandedOver
}
