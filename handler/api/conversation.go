package api

import (
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// Marks divide the canonical text of a conversation. They are bytes that UTF-8
// never has, so no text can be taken for them (a body that has them in its
// strings all the same is one that no engine serves):
//
//	for each tool:    markTool name markSep description markSep parameters
//	for each message: markMessage role markSep content tool calls
//	content:          text, and markMedia + 16 bytes for each other part
//	each tool call:   markCall name markSep arguments
//
// What an engine's template does with these it does to the same text in the
// same way, so two prompts with one canonical beginning have one beginning in
// tokens, whatever the template. But some templates write the tools first and
// some the system prompt: where there are both they agree together or not at
// all, see seal. All APIs for conversations share this form,
// each after the engines' own way of making a chat of its requests (vLLM,
// entrypoints/anthropic/serving.py and entrypoints/openai/responses/utils.py):
// a system prompt that stands apart is a first message of the role system, a
// tool's result a message of the role tool. Left out is what clients and
// engines rewrite between turns: ids of tool calls, names, reasoning,
// cache_control, and how JSON is spelled.
const (
	markMessage = 0xFF
	markSep     = 0xFE
	markMedia   = 0xFD
	markCall    = 0xFC
	markTool    = 0xFB
)

var (
	roleSystem    = []byte("system")
	roleUser      = []byte("user")
	roleAssistant = []byte("assistant")
	roleTool      = []byte("tool")
)

// conversation writes one as canonical text.
type conversation struct {
	h    *Hasher
	b    []byte
	seed uint64

	messages    int
	assistant   bool // the last message is the assistant's
	tooled      bool // there are tools
	sealed      bool
	over        bool // there are more parts than are read
	media       int
	mediaTokens int64
	mediaEnd    int64 // bytes up to the end of the last one
}

// maxParts is how many parts of a conversation are read that are not text.
// Each costs a digest, whatever its size.
const maxParts = 4096

// seal ends the head of a conversation: its tools, and the system prompt if it
// has one. With both, each block of the head is made to depend on all of it.
func (c *conversation) seal() {
	c.sealed = true
	if !c.tooled || c.messages == 0 {
		return
	}
	var d digest
	d.add(c.h.tail)
	var buf [8]byte
	for _, block := range c.h.blocks {
		binary.LittleEndian.PutUint64(buf[:], block)
		d.add(buf[:])
	}
	sum := d.sum()
	head := binary.LittleEndian.Uint64(sum[:]) &^ index.KindMask // kinds stay
	for i := range c.h.blocks {
		c.h.blocks[i] ^= head
	}
}

// open begins a message; the role is as it stands between its quotes.
func (c *conversation) open(role []byte) {
	name := text(role)
	if !c.sealed && name != "system" && name != "developer" {
		c.seal()
	}
	c.h.AddByte(markMessage)
	c.h.AddString(role)
	c.h.AddByte(markSep)
	c.messages++
	c.assistant = name == "assistant"
}

// content writes a message's content: a string, or parts one after the other,
// so that a text is the same in one part, in several, or as a plain string.
func (c *conversation) content(v span) {
	switch v.first(c.b) {
	case '"':
		raw, _ := v.str(c.b)
		c.h.AddString(raw)
	case '[':
		e := enter(c.b, v.start, 0)
		for e.next() {
			v := e.value()
			switch v.first(c.b) {
			case '"':
				raw, _ := v.str(c.b)
				c.h.AddString(raw)
			case '{':
				c.part(v)
			}
		}
	}
}

func (c *conversation) part(v span) {
	var kind, txt span
	var shown []byte // the member that shows something, in a part without a type
	e := enter(c.b, v.start, 0)
	for e.next() {
		key := e.key()
		v := e.value()
		switch string(key) {
		case "type":
			kind = v
		case "text", "refusal":
			txt = v
		default:
			if classOf(key) != mediaOther {
				shown = key
			}
		}
	}
	name, _ := kind.str(c.b)
	if len(name) == 0 && shown != nil {
		name = shown
	}
	switch string(name) {
	case "", "text", "input_text", "output_text", "refusal":
		if raw, ok := txt.str(c.b); ok {
			c.h.AddString(raw)
			return
		}
		if len(name) > 0 {
			return
		}
	case "thinking", "redacted_thinking", "reasoning":
		return
	}
	c.medium(v, name)
}

// medium writes a part that is not text.
func (c *conversation) medium(v span, name []byte) {
	m := readMedium(c.b, v, name)
	c.write(&m, v)
}

func (c *conversation) write(m *medium, v span) {
	if c.media >= maxParts {
		c.over = true
		return
	}
	sum := m.digest(c.b, v, c.seed)
	c.h.AddByte(markMedia)
	c.h.Add(sum[:])
	c.mediaEnd = c.h.Bytes()
	c.media++
	c.mediaTokens = min(c.mediaTokens+m.tokens(v), maxMediaTokens)
}

// tools writes a list of tools, each in one form: name, description and
// parameters, whatever the API wraps them in.
func (c *conversation) tools(v span) {
	c.tooled = c.tooled || hasMembers(c.b, v)
	if v.first(c.b) != '[' {
		if hasMembers(c.b, v) {
			c.h.AddByte(markTool)
			c.h.AddJSON(v.of(c.b))
		}
		return
	}
	e := enter(c.b, v.start, 0)
	for e.next() {
		v := e.value()
		c.h.AddByte(markTool)
		if v.first(c.b) == '{' {
			c.tool(v)
		} else {
			c.h.AddJSON(v.of(c.b))
		}
	}
}

// tool is where the parts of a tool's definition are.
type tool struct {
	kind, name, description, parameters, wrapped span
}

func readTool(b []byte, v span) (t tool) {
	e := enter(b, v.start, 0)
	for e.next() {
		key := e.key()
		v := e.value()
		switch string(key) {
		case "type":
			t.kind = v
		case "name":
			t.name = v
		case "description":
			t.description = v
		case "parameters", "input_schema", "format":
			t.parameters = v
		case "function", "custom":
			if v.first(b) == '{' {
				t.wrapped = v
			}
		}
	}
	return t
}

func (c *conversation) tool(v span) {
	t := readTool(c.b, v)
	kind, _ := t.kind.str(c.b)
	switch string(kind) {
	case "", "function", "custom":
	default: // the server's own, with members of its own
		c.h.AddString(kind)
		c.h.AddByte(markSep)
		c.others(v)
		return
	}
	if t.wrapped.end > 0 {
		t = readTool(c.b, t.wrapped)
	}
	name, _ := t.name.str(c.b)
	description, _ := t.description.str(c.b)
	c.h.AddString(name)
	c.h.AddByte(markSep)
	c.h.AddString(description)
	c.h.AddByte(markSep)
	if hasMembers(c.b, t.parameters) {
		c.h.AddJSON(t.parameters.of(c.b))
	}
}

// others writes an object of unknown members. The mark of a cache breakpoint
// is left out, for clients move it from turn to turn.
func (c *conversation) others(v span) {
	e := enter(c.b, v.start, 0)
	for e.next() {
		key := e.key()
		v := e.value()
		if string(key) == "cache_control" {
			continue
		}
		c.h.Add(key)
		c.h.AddByte(':')
		c.h.AddJSON(v.of(c.b))
	}
}

// toolCall is where the parts of a tool call are.
type toolCall struct {
	index, id, name, args span
}

// readCall reads an element of tool_calls, whole or a delta of one.
func readCall(b []byte, v span) (t toolCall) {
	var index, id, fn span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "index":
			index = v
		case "id":
			id = v
		case "function", "custom":
			if v.first(b) == '{' {
				fn = v
			}
		}
	}
	if fn.end > 0 {
		t = readFunction(b, fn)
	}
	t.index, t.id = index, id
	return t
}

func readFunction(b []byte, v span) (t toolCall) {
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "name":
			t.name = v
		case "arguments", "input":
			t.args = v
		}
	}
	return t
}

// addCall writes a call. Its arguments may go on in w.
func (h *Hasher) addCall(b []byte, t toolCall, w *arguments) {
	h.AddByte(markCall)
	if raw, ok := t.name.str(b); ok {
		h.AddString(raw)
	}
	h.AddByte(markSep)
	h.addArgs(b, t.args, w)
}

// addArgs writes a call's arguments or what is added to them: a string, or the
// value where an API, a client or an engine has an object in its place.
func (h *Hasher) addArgs(b []byte, args span, w *arguments) {
	if raw, ok := args.str(b); ok {
		w.addString(h, raw)
	} else if v := args.of(b); len(v) > 0 && !isNull(v) {
		h.AddJSON(v)
		w.mode = argsPlain
	}
}

// hasMembers is whether a value is neither absent, null nor empty.
func hasMembers(b []byte, v span) bool {
	switch v.first(b) {
	case '[', '{':
		at := skipSpace(b, v.start+1)
		return at < v.end-1
	case '"':
		return v.end-v.start > 2
	}
	return v.end > v.start && !isNull(v.of(b))
}
