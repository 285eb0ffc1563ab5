package api

import (
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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
	name := rawjson.Text(role)
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
func (c *conversation) content(v rawjson.Span) {
	switch v.First(c.b) {
	case '"':
		raw, _ := v.Str(c.b)
		c.h.AddString(raw)
	case '[':
		for v := range v.Elements(c.b) {
			switch v.First(c.b) {
			case '"':
				raw, _ := v.Str(c.b)
				c.h.AddString(raw)
			case '{':
				c.part(v)
			}
		}
	}
}

func (c *conversation) part(v rawjson.Span) {
	var kind, txt rawjson.Span
	var shown []byte // the member that shows something, in a part without a type
	e := rawjson.Enter(c.b, v.Start)
	for e.Next() {
		key := e.Key()
		v := e.Value()
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
	name, _ := kind.Str(c.b)
	if len(name) == 0 && shown != nil {
		name = shown
	}
	switch string(name) {
	case "", "text", "input_text", "output_text", "refusal":
		if raw, ok := txt.Str(c.b); ok {
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
func (c *conversation) medium(v rawjson.Span, name []byte) {
	m := readMedium(c.b, v, name)
	c.write(&m, v)
}

func (c *conversation) write(m *medium, v rawjson.Span) {
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
func (c *conversation) tools(v rawjson.Span) {
	c.tooled = c.tooled || v.HasContent(c.b)
	if v.First(c.b) != '[' {
		if v.HasContent(c.b) {
			c.h.AddByte(markTool)
			c.h.AddJSON(v.Of(c.b))
		}
		return
	}
	for v := range v.Elements(c.b) {
		c.h.AddByte(markTool)
		if v.First(c.b) == '{' {
			c.tool(v)
		} else {
			c.h.AddJSON(v.Of(c.b))
		}
	}
}

// tool is where the parts of a tool's definition are.
type tool struct {
	kind, name, description, parameters, wrapped rawjson.Span
}

func readTool(b []byte, v rawjson.Span) (t tool) {
	var function rawjson.Span
	v.Read(b, rawjson.To("type", &t.kind), rawjson.To("name", &t.name), rawjson.To("description", &t.description),
		rawjson.To("parameters", &t.parameters), rawjson.To("input_schema", &t.parameters), rawjson.To("format", &t.parameters),
		rawjson.To("function", &function), rawjson.To("custom", &function))
	if function.First(b) == '{' {
		t.wrapped = function
	}
	return t
}

func (c *conversation) tool(v rawjson.Span) {
	t := readTool(c.b, v)
	kind, _ := t.kind.Str(c.b)
	switch string(kind) {
	case "", "function", "custom":
	default: // the server's own, with members of its own
		c.h.AddString(kind)
		c.h.AddByte(markSep)
		c.others(v)
		return
	}
	if t.wrapped.End > 0 {
		t = readTool(c.b, t.wrapped)
	}
	name, _ := t.name.Str(c.b)
	description, _ := t.description.Str(c.b)
	c.h.AddString(name)
	c.h.AddByte(markSep)
	c.h.AddString(description)
	c.h.AddByte(markSep)
	if t.parameters.HasContent(c.b) {
		c.h.AddJSON(t.parameters.Of(c.b))
	}
}

// others writes an object of unknown members. The mark of a cache breakpoint
// is left out, for clients move it from turn to turn.
func (c *conversation) others(v rawjson.Span) {
	e := rawjson.Enter(c.b, v.Start)
	for e.Next() {
		key := e.Key()
		v := e.Value()
		if string(key) == "cache_control" {
			continue
		}
		c.h.Add(key)
		c.h.AddByte(':')
		c.h.AddJSON(v.Of(c.b))
	}
}

// toolCall is where the parts of a tool call are.
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
	v.Read(b,
		rawjson.To("name", &t.name), rawjson.To("arguments", &t.args), rawjson.To("input", &t.args),
	)
	return t
}

// addCall writes a call. Its arguments may go on in w.
func (h *Hasher) addCall(b []byte, t toolCall, w *arguments) {
	h.AddByte(markCall)
	if raw, ok := t.name.Str(b); ok {
		h.AddString(raw)
	}
	h.AddByte(markSep)
	h.addArgs(b, t.args, w)
}

// addArgs writes a call's arguments or what is added to them: a string, or the
// value where an API, a client or an engine has an object in its place.
func (h *Hasher) addArgs(b []byte, args rawjson.Span, w *arguments) {
	if raw, ok := args.Str(b); ok {
		w.addString(h, raw)
	} else if args.Len() > 0 && !args.IsNull(b) {
		h.AddJSON(args.Of(b))
		w.mode = argsPlain
	}
}
