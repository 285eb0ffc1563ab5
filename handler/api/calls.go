package api

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

type toolCall struct {
	index, id, name, args rawjson.Span
}

// readCall reads an element of tool_calls, whole or a delta of one.
func readCall(b []byte, v rawjson.Span) (t toolCall) {
	var index, id, fn rawjson.Span
	v.Read(b, rawjson.To("index", &index), rawjson.To("id", &id), rawjson.To("function", &fn), rawjson.To("custom", &fn))
	t = readFunction(b, fn)
	t.index, t.id = index, id
	return t
}

func readFunction(b []byte, v rawjson.Span) (t toolCall) {
	v.Read(b, rawjson.To("name", &t.name), rawjson.To("arguments", &t.args), rawjson.To("input", &t.args))
	return t
}

func (c *conversation) call(t toolCall) {
	c.h.beginCall(c.b, t)
	if t.args.First(c.b) == '{' {
		c.h.addJSON(t.args.Of(c.b))
		return
	}
	c.args = appendArguments(c.args[:0], c.b, t.args)
	c.h.addArguments(c.args)
}

func (h *hasher) beginCall(b []byte, t toolCall) {
	h.addByte(markCall)
	name, _ := t.name.Str(b)
	h.addString(name)
	h.addByte(markSep)
}

// appendArguments appends the text of a call's arguments, or of a piece of them.
// They are a string, or JSON where clients and engines have an object instead.
func appendArguments(to, b []byte, args rawjson.Span) []byte {
	if raw, ok := args.Str(b); ok {
		return rawjson.AppendText(slices.Grow(to, len(raw)), raw)
	}
	if args.IsNull(b) {
		return to
	}
	return append(to, args.Of(b)...)
}

// addArguments writes a call's whole arguments. APIs and clients write the JSON
// of an object in their own ways; other text, the input of a custom tool, stays.
func (h *hasher) addArguments(text []byte) {
	text = text[rawjson.SkipSpace(text, 0):]
	if len(text) > 0 && text[0] == '{' {
		h.addJSON(text)
	} else {
		h.add(text)
	}
}

// callState is the state of a stream's tool calls. The last one's arguments are
// in Answer.args.
type callState struct {
	open  bool // a call has begun
	index int64
}

// toolCalls reads a delta's tool calls. The first delta of a call has its name;
// those that follow add to its arguments.
func (a *Answer) toolCalls(b []byte, v rawjson.Span) {
	for v := range v.Objects(b) {
		t := readCall(b, v)
		named := t.name.HasContent(b)
		if named || t.args.HasContent(b) || t.id.HasContent(b) {
			a.bearing, a.kept.lost = true, true
			a.pinStream(NotResumableToolCall)
		}
		if !a.predictable {
			continue
		}
		index, ok := integer(t.index.Of(b))
		if !ok { // a plain answer, or an engine that omits it
			index = a.calls.index
			if named && a.calls.open {
				index++
			}
		}
		if index < 0 || a.calls.open && index < a.calls.index {
			a.predictable = false
			continue
		}
		begins := !a.calls.open || index > a.calls.index
		a.calls.index = index
		if begins != named { // a name elsewhere than at the beginning
			a.predictable = false
		} else if begins {
			a.beginCall(b, t)
		}
		a.calls.open = true
		a.addArguments(b, t.args)
	}
}

func (a *Answer) beginCall(b []byte, t toolCall) {
	a.endCall()
	a.calls.open = true
	if a.predictable {
		a.hash.beginCall(b, t)
	}
}

func (a *Answer) addArguments(b []byte, args rawjson.Span) {
	if a.predictable {
		a.args = appendArguments(a.args, b, args)
		a.bound()
	}
}

func (a *Answer) endCall() {
	if a.predictable {
		a.hash.addArguments(a.args)
	}
	a.args = a.args[:0]
}
