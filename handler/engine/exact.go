package engine

import (
	"bytes"
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
	prompt  []byte // a JSON list of ids
	state   []byte // of the derenderer; empty before the first call
}

// ReturnsIDs returns whether the engine can go on with the ids of an answer's tokens that are asked
// for by api.AskIDs. name is the request's [Request.API].
func (e *Engine) ReturnsIDs(name string) bool { return slices.Contains(kindOf(e.Type).exact, name) }

// NewExact returns how to go on with an answer of these ids to a request, as the engine gets it.
func NewExact(name string, request []byte, ids []uint32) *Exact {
	x := &Exact{ids: ids, member: "chat_request"}
	e := api.EditObject(request)
	if e == nil {
		return nil
	}
	if name == api.NameCompletions {
		x.member = "completion_request"
		e.Set("prompt", []byte(`"."`))
	} else {
		e.Set("messages", []byte(`[{"role":"user","content":"."}]`))
	}
	x.request = e.Apply()
	return x
}

// Paths returns the paths below the engine's root at which it renders, generates and derenders, for
// the path of the client's API.
func (*Exact) Paths(of string) (render, generate, derender string) {
	root, _, _ := strings.Cut(of, "/v1/")
	return of + "/render", root + "/inference/v1/generate", of + "/derender"
}

// Generate returns the body that asks for more tokens, from the answer of render. It is not ok if
// that has another form.
func (x *Exact) Generate(rendered []byte) (ask []byte, ok bool) {
	x.prompt = tokensIn(200, rendered, "token_ids")
	if x.prompt == nil {
		return nil, false
	}
	object := gjson.ParseBytes(rendered)
	if object.IsArray() {
		object = object.Get("0")
	}
	e := api.EditObject([]byte(object.Raw))
	if e == nil {
		return nil, false
	}
	e.Set("token_ids", x.appendIDs(slices.Clip(x.prompt[:len(x.prompt)-1]), true))
	e.Set("stream", []byte("true"))
	return e.Apply(), true
}

// appendIDs appends the ids and closes the list. more: an id stands before.
func (x *Exact) appendIDs(list []byte, more bool) []byte {
	for _, id := range x.ids {
		if more {
			list = append(list, ',')
		}
		more = true
		list = strconv.AppendUint(list, uint64(id), 10)
	}
	return append(list, ']')
}

// Derender returns the body that asks for the client's event for more of the answer. The pieces are
// events of generate. First, nil stands for the answer so far. It is nil if the
// pieces have no tokens, and no end.
func (x *Exact) Derender(pieces [][]byte) []byte {
	ids, end := []byte{'['}, []byte(nil)
	if pieces == nil {
		ids = x.appendIDs(ids, false)
		ids = ids[:len(ids)-1]
	}
	for _, p := range pieces {
		choice := gjson.GetBytes(p, "choices.0")
		if list := strings.TrimSpace(choice.Get("token_ids").Raw); len(list) > 2 && list[0] == '[' {
			if len(ids) > 1 {
				ids = append(ids, ',')
			}
			ids = append(ids, list[1:len(list)-1]...)
		}
		for _, name := range [...]string{"finish_reason", "stop_reason"} {
			if v := choice.Get(name); v.Exists() && v.Type != gjson.Null {
				end = append(append(end, `,"`+name+`":`...), v.Raw...)
			}
		}
	}
	if len(ids) == 1 && end == nil {
		return nil
	}
	var o rawjson.Object
	o.Open()
	o.Raw("stream", []byte("true"))
	o.Raw("generate_chunk", slices.Concat([]byte(`{"request_id":"","choices":[{"index":0,"token_ids":`), ids, []byte{']'}, end, []byte(`}]}`)))
	if len(x.state) > 0 {
		o.Raw("stream_state", x.state)
	}
	o.Raw("prompt_token_ids", x.prompt)
	o.Raw(x.member, x.request)
	o.Close()
	return o.Buf
}

// Event reads an answer of the derenderer, and returns the data of the client's event. It is not ok
// if that has another form.
func (x *Exact) Event(answer []byte) (data []byte, ok bool) {
	if !gjson.ValidBytes(answer) {
		return nil, false
	}
	chunk, state := gjson.GetBytes(answer, "chunk"), gjson.GetBytes(answer, "stream_state")
	if !chunk.IsObject() || !state.IsObject() {
		return nil, false
	}
	x.state = []byte(state.Raw)
	if lens := state.Get("output_chunk_lens"); lens.IsArray() && lens.Index > 0 { // of what the parsers read
		at := lens.Index - state.Index
		ones := bytes.Repeat([]byte(",1"), int(state.Get("output_token_ids.#").Int())) // as they do mostly
		ones = append(append([]byte{'['}, bytes.TrimPrefix(ones, []byte{','})...), ']')
		x.state = slices.Concat(x.state[:at], ones, x.state[at+len(lens.Raw):])
	}
	return withoutNulls([]byte(chunk.Raw)), true
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

// withoutNulls takes the members that are null out of a chunk, its choices and their deltas, except
// for those that unbroken streams have, too.
func withoutNulls(chunk []byte) []byte {
	var edits []rawjson.Edit
	var walk func(at int)
	walk = func(at int) {
		c, cut := rawjson.Enter(chunk, at), rawjson.Cutter{Edits: &edits}
		for c.Next() {
			key, v := string(c.Key()), c.Value()
			if v.IsNull(chunk) && key != "finish_reason" && key != "logprobs" || key == "tool_calls" && !v.HasContent(chunk) {
				cut.Drop(&c, v)
				continue
			}
			cut.Keep(&c)
			if key == "delta" && v.First(chunk) == '{' {
				walk(v.Start)
			}
			if key == "choices" {
				for o := range v.Objects(chunk) {
					walk(o.Start)
				}
			}
		}
	}
	walk(0)
	return rawjson.Splice(nil, chunk, edits)
}
