package engine

import (
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// vllmPhases are vLLM's (vllm/distributed/kv_transfer/kv_connector/v1). With the NIXL connectors, the
// answer to the prefill phase says where the prompt's blocks are. With Mooncake, the prefill engine's
// bootstrap server does. The decode engine then fetches them, or has them sent. NIXL keeps them for
// 30 s, and longer while the decode engine says that it still needs them. Mooncake keeps them for 480 s.
// Either phase may be canceled at any time. If the decode engine does not get the blocks, it answers with
// 500, except with NixlPushConnector: then it waits for ever.
//
// NixlPushConnector and Mooncake would take both phases at once. But then the decode engine holds memory
// while the prompt is computed. And if the first token ends the answer, it waits for blocks that never come.
var vllmPhases = Phases{
	apis:  []string{api.NameChat, api.NameCompletions, api.NameMessages, api.NameResponses, api.NameTokens},
	whole: true, TransferTimeout: 30 * time.Second,
	prefill: (*adapter).vllmPrefill, decode: (*adapter).vllmDecode, readTransfer: readVLLMTransfer,
}

const nameTransfer = "kv_transfer_params"

// remoteDecode asks vLLM to keep the prompt's blocks for another engine.
const remoteDecode = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// vllmPrefill asks for one token, in a plain answer that the engine does not store.
func (f *adapter) vllmPrefill() {
	b, one := f.Body, []byte{'1'}
	f.vllmPair()
	b.Set("stream", []byte("false"))
	b.Cut("stream_options")
	if f.Phase.Remote == "" {
		b.Set(nameTransfer, []byte(remoteDecode))
	} else {
		b.Set(nameTransfer, f.Phase.mooncake(true))
	}
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

func (f *adapter) vllmDecode() {
	f.vllmPair()
	f.Body.Set(nameTransfer, f.Phase.TransferParams)
}

const headerRequestID = "X-Request-Id"

// vllmPair gives both phases one id, by which NixlPushConnector joins them. No other request has it, even
// if the client sends its own id twice.
func (f *adapter) vllmPair() {
	const longest = 128
	id := f.Phase.ID
	if own := f.Sent[headerRequestID]; len(own) > 0 && own[0] != "" && len(own[0]) <= longest &&
		!strings.Contains(own[0], ",") { // which NIXL's heartbeats cannot carry
		id = own[0] + "-" + id
	}
	f.header(headerRequestID, id)
	if f.API == api.NameResponses { // where vLLM does not read the header
		f.text("request_id", "resp_"+f.Phase.ID)
	}
}

// mooncake returns what an engine with the Mooncake connector must know of the transfer.
func (l *Phase) mooncake(prefill bool) []byte {
	var o rawjson.Object
	o.Open()
	o.Raw("do_remote_decode", strconv.AppendBool(nil, prefill))
	o.Raw("do_remote_prefill", strconv.AppendBool(nil, !prefill))
	o.Text("transfer_id", l.ID)
	if !prefill {
		o.Text("remote_engine_id", l.Remote)
		o.Text("remote_bootstrap_addr", "http://"+net.JoinHostPort(l.Host, strconv.Itoa(l.Port)))
	}
	o.Close()
	return o.Buf
}

// PathMooncake is where Mooncake's bootstrap server names the ranks of its engine.
const PathMooncake = "/query"

// MooncakeIDs reads that: {"0": {"engine_id": ..., ...}, ...}. It returns none if the server does not name
// just as many ranks as the router knows.
func MooncakeIDs(answer []byte, ranks int) string {
	of := readObject(answer).Map()
	if len(of) != ranks {
		return ""
	}
	ids := make([]string, ranks)
	for i := range ids {
		ids[i] = of[strconv.Itoa(i)].Get("engine_id").Str
		if ids[i] == "" || len(ids[i]) > maxMooncakeID || strings.Contains(ids[i], "\n") {
			return ""
		}
	}
	return strings.Join(ids, "\n")
}

const maxMooncakeID = 256

// readVLLMTransfer takes kv_transfer_params from the answer. An engine without a connector has none, and
// neither has an answer that ended with its first token. With Mooncake, no answer has any.
func readVLLMTransfer(answer []byte, l *Phase) PrefillResult {
	if !gjson.ValidBytes(answer) {
		return NoTransfer
	}
	params := gjson.GetBytes(answer, nameTransfer)
	stop := gjson.GetBytes(answer, "stop_reason").Str // of messages
	switch {
	case params.IsObject() && params.Get("do_remote_prefill").Bool():
	case gjson.GetBytes(answer, pathFinish).Str == "stop", stop == "end_turn", stop == "stop_sequence":
		return l.over(answer)
	case gjson.GetBytes(answer, "status").Str == "completed":
		return AnswerEnded // a response, which this engine does not store
	case l.Remote != "" && (gjson.GetBytes(answer, pathFinish).Str == "length" || stop == "max_tokens" ||
		gjson.GetBytes(answer, "status").Str == "incomplete"):
		l.TransferParams = l.mooncake(false)
		return Transferable
	default:
		return NoTransfer
	}
	l.TransferParams = []byte(params.Raw)
	if params.Get("remote_host").Type == gjson.Null {
		e := rawjson.EditObject(l.TransferParams)
		if e == nil {
			return NoTransfer
		}
		e.Set("remote_host", quoted(l.Host))
		l.TransferParams = e.Apply()
	}
	return Transferable
}
