package engine

import (
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Exact goes on with an answer by the ids of its tokens, with the endpoints that vLLM has with
// --enable-scale-out (vllm/entrypoints/scale_out). One renders the prompt, which goes on with the
// ids. One generates more ids. One turns these into the events of the client's API. It gets all
// ids, so that the parsers of reasoning and tool calls stand where those of the first engine stood.
type Exact struct {
	request []byte // the client's, without its prompt
	member  string // that has it
	ids     []uint32
	lens    []uint16 // how many of them each event had
	prompt  []byte   // a JSON list of ids
	state   []byte   // of the derenderer; empty before the first call

	sent   []byte // the ids of the last call, without brackets
	finish string // its reason of the end, as JSON; empty if there is none
}

// ReturnsIDs returns whether the engine can go on with the ids of an answer's tokens that are asked
// for by api.AskIDs. name is the request's [Request.API].
func (e *Engine) ReturnsIDs(name string) bool { return slices.Contains(kindOf(e.Type).exact, name) }

// NewExact returns how to go on with the answer to a request, as the engine gets it. It has these
// ids, and each event had so many of them. It returns nil for a request that is no object.
func NewExact(name string, request []byte, ids []uint32, lens []uint16) *Exact {
	x := &Exact{ids: ids, lens: lens, member: "chat_request"}
	e := rawjson.EditObject(request)
	if e == nil {
		return nil
	}
	if name == api.NameCompletions {
		x.member = "completion_request"
		e.Set("prompt", []byte(`"."`))
	} else {
		e.Set("messages", calls(gjson.GetBytes(request, "messages")))
	}
	x.request = e.Apply()
	return x
}

// calls returns the messages that have tool calls, and one more. Some parsers count earlier calls
// for the names of new ones.
func calls(messages gjson.Result) []byte {
	list := []byte{'['}
	for _, m := range messages.Array() {
		if m.Get("tool_calls.#").Int() > 0 {
			list = append(append(list, m.Raw...), ',')
		}
	}
	return append(list, `{"role":"user","content":"."}]`...)
}

// Size returns how many bytes a call takes, about.
func (x *Exact) Size() int64 { return int64(len(x.request) + len(x.prompt) + 16*len(x.ids)) }

// Paths returns the paths below the engine's root at which it renders, generates and derenders, for
// the path of the client's API.
func (*Exact) Paths(of string) (render, generate, derender string) {
	root, _, _ := strings.Cut(of, "/v1/")
	return of + "/render", root + "/inference/v1/generate", of + "/derender"
}

// Generate returns the body that asks for more tokens, from the answer of render. It is not ok if
// that has another form, or a grammar: that would restart at its root.
func (x *Exact) Generate(rendered []byte) (ask []byte, ok bool) {
	x.prompt = tokensIn(200, rendered, "token_ids")
	if x.prompt == nil {
		return nil, false
	}
	object := gjson.ParseBytes(rendered)
	if object.IsArray() {
		object = object.Get("0")
	}
	e := rawjson.EditObject([]byte(object.Raw))
	if e == nil {
		return nil, false
	}
	e.Set("token_ids", append(appendIDs(slices.Clip(x.prompt[:len(x.prompt)-1]), x.ids), ']'))
	e.Set("stream", []byte("true"))
	if sampling := object.Get("sampling_params"); sampling.IsObject() {
		if sampling.Get("structured_outputs").IsObject() {
			return nil, false
		}
		in, _ := e.Object("sampling_params")
		for name, least := range map[string]int64{"max_tokens": 1, "min_tokens": 0} {
			if n := sampling.Get(name); in != nil && n.Type == gjson.Number {
				in.Set(name, strconv.AppendInt(nil, max(n.Int()-int64(len(x.ids)), least), 10))
			}
		}
	}
	return e.Apply(), true
}

// appendIDs appends numbers to a list that has no closing bracket.
func appendIDs[T uint16 | uint32](list []byte, ids []T) []byte {
	for _, id := range ids {
		if n := len(list); n > 0 && list[n-1] != '[' {
			list = append(list, ',')
		}
		list = strconv.AppendUint(list, uint64(id), 10)
	}
	return list
}

// Derender returns the body that asks for the client's event for more of the answer. The pieces are
// events of generate. First, nil stands for the answer so far. It is nil if the pieces have no
// tokens, and no end.
func (x *Exact) Derender(pieces [][]byte) []byte {
	var end []byte
	x.sent, x.finish = x.sent[:0], ""
	if pieces == nil {
		x.sent = appendIDs(x.sent, x.ids)
	}
	for _, p := range pieces {
		choice := gjson.GetBytes(p, "choices.0")
		if list := strings.TrimSpace(choice.Get("token_ids").Raw); len(list) > 2 && list[0] == '[' {
			if len(x.sent) > 0 {
				x.sent = append(x.sent, ',')
			}
			x.sent = append(x.sent, list[1:len(list)-1]...)
		}
		for _, name := range [...]string{nameFinish, "stop_reason"} {
			if v := choice.Get(name); v.Exists() && v.Type != gjson.Null {
				end = append(append(end, `,"`+name+`":`...), v.Raw...)
			}
		}
		if v := choice.Get(nameFinish); v.Type == gjson.String {
			x.finish = v.Raw
		}
	}
	if len(x.sent) == 0 && end == nil {
		return nil
	}
	var o rawjson.Object
	o.Open()
	o.Raw("stream", []byte("true"))
	o.Raw("generate_chunk", slices.Concat([]byte(`{"request_id":"","choices":[{"index":0,"token_ids":[`), x.sent, []byte{']'}, end, []byte(`}]}`)))
	if len(x.state) > 0 {
		o.Raw("stream_state", x.state)
	}
	o.Raw("prompt_token_ids", x.prompt)
	o.Raw(x.member, x.request)
	o.Close()
	return o.Buf
}

// Event reads an answer of the derenderer, and returns the data of the client's event, with the ids
// of its tokens. It is not ok if that has another form.
func (x *Exact) Event(answer []byte) (data []byte, ok bool) {
	if !gjson.ValidBytes(answer) {
		return nil, false
	}
	chunk, state := gjson.GetBytes(answer, "chunk"), gjson.GetBytes(answer, "stream_state")
	if !chunk.IsObject() || !state.IsObject() {
		return nil, false
	}
	begins := len(x.state) == 0
	x.state = []byte(state.Raw)
	if e := rawjson.EditObject(x.state); begins && e != nil && len(state.Get(nameLens).Array()) > 0 { // parsers read the answer event by event
		e.Set(nameLens, append(appendIDs([]byte{'['}, x.lens), ']'))
		x.state = e.Apply()
	}
	e := rawjson.EditObject([]byte(chunk.Raw))
	if !x.complete(e) {
		return nil, false
	}
	return e.Apply(), true
}

const nameLens, nameFinish = "output_chunk_lens", "finish_reason"

// complete takes the members that are null out of a chunk's object, except for those that unbroken streams
// have, too. A choice gets the ids, which completions lack, and the reason of its end. The derenderer has its own
// reason for an answer with tool calls. It returns false if there is too much in the object.
func (x *Exact) complete(e *rawjson.Editor) (ok bool) {
	if e == nil {
		return false
	}
	e.Drop(func(name string, v rawjson.Span) bool {
		return v.IsNull(e.Body) && name != nameFinish && name != "logprobs" || name == "tool_calls" && !v.HasContent(e.Body)
	})
	ok = true
	for name, v := range e.All() {
		switch {
		case (name == "delta" || name == "function") && v.First(e.Body) == '{':
			ok = ok && x.complete(e.Within(v.Start))
		case name == "choices" || name == "tool_calls":
			for o := range v.Objects(e.Body) {
				in := e.Within(o.Start)
				if ok = ok && x.complete(in); ok && name == "choices" {
					in.Set("token_ids", slices.Concat([]byte{'['}, x.sent, []byte{']'}))
					if x.finish != "" && x.finish != `"stop"` {
						in.Set(nameFinish, []byte(x.finish))
					}
				}
			}
		}
	}
	return ok
}

// Aborts returns whether an event of generate says that the engine ends the answer for a fault.
func (*Exact) Aborts(piece []byte) bool {
	reason := gjson.GetBytes(piece, "choices.0.finish_reason").Str
	return reason == "abort" || reason == "error"
}

// Usage returns the data of the client's event for an event of generate that has usage and no
// tokens; nil for others.
func (x *Exact) Usage(piece []byte) []byte {
	usage := gjson.GetBytes(piece, "usage")
	if !usage.IsObject() || gjson.GetBytes(piece, "choices.#").Int() != 0 {
		return nil
	}
	kind := "chat.completion.chunk"
	if x.member == "completion_request" {
		kind = "text_completion"
	}
	return []byte(`{"id":"","object":"` + kind + `","created":0,"model":"","choices":[],"usage":` + usage.Raw + `}`)
}
