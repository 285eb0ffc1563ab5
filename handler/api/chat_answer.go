package api

import (
	"bytes"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

func (chat) begin(a *Answer) { a.beginMessage() }

// beginMessage opens the message that the client will send back.
func (a *Answer) beginMessage() {
	a.hash.AddByte(markMessage)
	a.hash.Add(roleAssistant)
	a.hash.AddByte(markSep)
}

func (chat) event(a *Answer, b []byte, i int) bool {
	return a.chunk(b, i, chatChoice)
}

// chatChoice reads the object at b[i], an element of an answer's or chunk's
// choices, and returns the index behind it, or -1 if it is malformed.
func chatChoice(a *Answer, b []byte, i int) int {
	var index, delta, finish, ids rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("index", &index), rawjson.To("delta", &delta), rawjson.To("message", &delta),
		rawjson.To("finish_reason", &finish), rawjson.To("token_ids", &ids))
	if end < 0 {
		return -1
	}
	a.ids.add(b, ids)
	a.select0(b, index)
	if delta.First(b) == '{' {
		a.delta(b, delta)
	}
	a.finishReason(b, finish)
	return end
}

// delta reads what one chunk adds to the message, or the whole message of a
// plain answer. Text is written before tool calls, in whatever order they
// stand, as it is in a prompt.
func (a *Answer) delta(b []byte, v rawjson.Span) {
	var content, calls, call rawjson.Span
	c := rawjson.Enter(b, v.Start)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		switch string(key) {
		case "content":
			content = v
		case "tool_calls":
			calls = v
		case "function_call":
			call = v
		case "role":
			if raw, ok := v.Str(b); ok && len(raw) > 0 && string(raw) != "assistant" {
				a.unlike()
			}
		case "reasoning", "reasoning_content", "reasoning_details", "thinking":
			if v.HasContent(b) {
				a.bearing, a.steady = true, false
			}
		case "refusal", "audio":
			if v.HasContent(b) {
				a.bearing = true
				a.unlike()
			}
		}
	}
	if raw, ok := content.Str(b); ok {
		a.chatText(raw)
	} else if content.HasContent(b) {
		a.bearing = true
		a.unlike() // parts: not sent back as they came
	}
	a.toolCalls(b, calls)
	if call.First(b) == '{' {
		a.functionCall(b, call)
	}
}

func (a *Answer) chatText(raw []byte) {
	a.repeat.chat = true
	if a.steady && len(raw) > 0 && (a.calls.open || a.think.saw(raw)) {
		a.steady = false
	}
	a.text(raw)
}

// callState is where a stream stands in its tool calls.
type callState struct {
	open   bool // a call has begun
	legacy bool // it is a function_call
	index  int64
	args   arguments
}

// toolCalls reads a delta's tool calls. A call's first delta has its name;
// those that follow add to its arguments.
func (a *Answer) toolCalls(b []byte, v rawjson.Span) {
	for v := range v.Objects(b) {
		t := readCall(b, v)
		name, _ := t.name.Str(b)
		if len(name) > 0 || t.args.HasContent(b) || t.id.HasContent(b) {
			a.bearing, a.kept.lost = true, true
		}
		if !a.steady {
			continue
		}
		index, ok := integer(t.index.Of(b))
		if !ok { // a plain answer, or an engine that leaves it out
			index = a.calls.index
			if len(name) > 0 && a.calls.open {
				index++
			}
		}
		if a.calls.legacy || index < 0 || a.calls.open && index < a.calls.index {
			a.steady = false
			continue
		}
		begins := !a.calls.open || index > a.calls.index
		a.calls.open, a.calls.index = true, index
		a.call(b, t, name, begins)
	}
}

func (a *Answer) functionCall(b []byte, v rawjson.Span) {
	t := readFunction(b, v)
	name, _ := t.name.Str(b)
	if len(name) == 0 && !t.args.HasContent(b) {
		return
	}
	a.bearing, a.kept.lost = true, true
	if a.calls.open && !a.calls.legacy {
		a.steady = false
	}
	if a.steady {
		begins := !a.calls.open
		a.calls.open, a.calls.legacy = true, true
		a.call(b, t, name, begins)
	}
}

// call writes a call or what is added to one. A name comes once and first;
// a name in another place cannot be put where the client will have it.
func (a *Answer) call(b []byte, t toolCall, name []byte, begins bool) {
	switch {
	case begins != (len(name) > 0):
		a.steady = false
	case begins:
		a.calls.args = arguments{}
		a.hash.addCall(b, t, &a.calls.args)
	default:
		a.hash.addArgs(b, t.args, &a.calls.args)
	}
	a.bound()
}

const (
	thinkOpen = "<think>"
	thinkShut = "</think>"
)

// thinkWatch finds reasoning that an engine without a reasoning parser leaves
// in the text: a text that begins with <think>, or has a </think>, which is
// alone where the template has written the opening. Templates drop it from
// earlier turns, so the cache cannot serve such an answer when it comes back.
type thinkWatch struct {
	past       bool // the text does not begin with <think>
	open, shut int  // matched so far
}

// saw reads on, and returns true once reasoning is found.
func (w *thinkWatch) saw(raw []byte) bool {
	if w.past && w.shut == 0 && bytes.IndexByte(raw, '<') < 0 && bytes.IndexByte(raw, '\\') < 0 {
		return false
	}
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		if slices.ContainsFunc(p, w.byte) {
			return true
		}
	}
	return false
}

func (w *thinkWatch) byte(c byte) bool {
	if !w.past && (w.open > 0 || c != ' ' && c != '\n' && c != '\r' && c != '\t') {
		if c == thinkOpen[w.open] {
			if w.open++; w.open == len(thinkOpen) {
				return true
			}
		} else {
			w.past = true
		}
	}
	switch c {
	case thinkShut[w.shut]:
		if w.shut++; w.shut == len(thinkShut) {
			return true
		}
	case '<':
		w.shut = 1
	default:
		w.shut = 0
	}
	return false
}
