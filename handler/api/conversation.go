package api

import (
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Marks divide the canonical text of a conversation. UTF-8 has none of these
// bytes, so no text contains them:
//
//	for each message: markMessage role markSep content tool calls
//	for each tool:    markTool name markSep description markSep parameters, and markSep strict if it has that
//	content:          text, and markMedia + 16 bytes for each other part
//	each tool call:   markCall name markSep arguments
//
// An engine's template treats equal text equally. Two prompts with one canonical
// beginning therefore have one beginning in tokens, with any template. But
// templates differ in whether tools or system prompt come first: see seal. The text has the tools
// behind the system prompt.
//
// All APIs for conversations share this form. It follows what engines make of
// their requests. See vLLM's entrypoints/anthropic/serving.py and
// entrypoints/openai/responses/utils.py. A separate system prompt is a first
// message of the role system. A tool's result is a message of the role tool.
// The form omits what clients and engines rewrite between turns: ids of tool
// calls, names, reasoning, cache_control, and the spelling of JSON.
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

type conversation struct {
	h    *hasher
	b    []byte
	seed uint64
	args []byte // memory for a call's arguments

	messages    int
	assistant   bool            // the last message is the assistant's
	lists       [2]rawjson.Span // of tools, until they are written behind the system prompt
	tooled      bool            // there are tools
	sealed      bool
	head        cache.Head
	over        bool // there are more than maxParts
	media       int
	mediaTokens int64
	mediaEnd    int64 // bytes up to the end of the last one
}

// maxParts is how many parts that are not text are read. Each costs a digest of any
// size.
const maxParts = 4096

// seal ends the head of a conversation: system prompt and tools. If it has both,
// each block of the head depends on the whole head.
func (c *conversation) seal() {
	c.sealed = true
	for _, v := range c.lists {
		c.tools(v)
	}
	if !c.tooled || c.messages == 0 {
		return
	}
	c.head.Key = c.h.sum() &^ cache.KindMask // kinds stay
	c.head.Blocks = len(c.h.blocks)
	for i := range c.h.blocks {
		c.h.blocks[i] ^= c.head.Key
	}
}

func (p *parse) conversed(t *conversation) {
	if !t.sealed {
		t.seal()
	}
	p.shown(t)
	p.req.Head = t.head
	if t.messages > 0 {
		p.req.Kind, p.req.Bytes = Text, p.hash.written()
	}
}

// open begins a message. The role is given between its quotes.
func (c *conversation) open(role []byte) {
	name := rawjson.Text(role)
	if !c.sealed && name != "system" && name != "developer" {
		c.seal()
	}
	c.h.addByte(markMessage)
	c.h.addString(role)
	c.h.addByte(markSep)
	c.messages++
	c.assistant = name == "assistant"
}

// content writes a message's content: a string, or parts one after the other. A
// text in one part, in several, or as a plain string is the same.
func (c *conversation) content(v rawjson.Span) {
	if raw, ok := v.Str(c.b); ok {
		c.h.addString(raw)
		return
	}
	for v := range v.Elements(c.b) {
		if raw, ok := v.Str(c.b); ok {
			c.h.addString(raw)
		} else if v.First(c.b) == '{' {
			c.part(v)
		}
	}
}

func (c *conversation) part(v rawjson.Span) {
	var kind, txt rawjson.Span
	var shown []byte // the member with the content, in a part without a type
	for key, v := range v.Members(c.b) {
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
			c.h.addString(raw)
			return
		}
		if len(name) > 0 {
			return
		}
	case "thinking", "redacted_thinking", "reasoning":
		return
	}
	m := medium{class: classOf(name)}
	if len(name) > 0 {
		m.read(c.b, v, name)
	}
	c.medium(&m, v)
}

// medium writes a part that is not text.
func (c *conversation) medium(m *medium, v rawjson.Span) {
	if c.media >= maxParts {
		c.over = true
		return
	}
	sum := m.digest(c.b, v, c.seed)
	c.h.addByte(markMedia)
	c.h.add(sum[:])
	c.mediaEnd = c.h.written()
	c.media++
	c.mediaTokens = min(c.mediaTokens+m.tokens(v), maxMediaTokens)
}

// tools writes a list of tools. All APIs' forms give the same text.
func (c *conversation) tools(v rawjson.Span) {
	if !v.HasContent(c.b) {
		return
	}
	c.tooled = true
	if v.First(c.b) != '[' {
		c.h.addByte(markTool)
		c.h.addJSON(v.Of(c.b))
		return
	}
	for v := range v.Elements(c.b) {
		c.h.addByte(markTool)
		if v.First(c.b) == '{' {
			c.tool(v)
		} else {
			c.h.addJSON(v.Of(c.b))
		}
	}
}

func (c *conversation) tool(v rawjson.Span) {
	var kind, name, description, parameters, strict, wrapped rawjson.Span
	read := func(v rawjson.Span) {
		v.Read(c.b, rawjson.To("name", &name), rawjson.To("description", &description),
			rawjson.To("parameters", &parameters), rawjson.To("input_schema", &parameters), rawjson.To("format", &parameters),
			rawjson.To("strict", &strict), rawjson.To("type", &kind), rawjson.To("function", &wrapped), rawjson.To("custom", &wrapped))
	}
	read(v)
	raw, _ := kind.Str(c.b)
	switch string(raw) {
	case "", "function", "custom":
	default: // the server's own, with members of its own
		c.h.addString(raw)
		c.h.addByte(markSep)
		c.others(v)
		return
	}
	if wrapped.First(c.b) == '{' {
		name, description, parameters, strict = rawjson.Span{}, rawjson.Span{}, rawjson.Span{}, rawjson.Span{}
		read(wrapped)
	}
	raw, _ = name.Str(c.b)
	c.h.addString(raw)
	c.h.addByte(markSep)
	raw, _ = description.Str(c.b)
	c.h.addString(raw)
	c.h.addByte(markSep)
	if parameters.HasContent(c.b) {
		c.h.addJSON(parameters.Of(c.b))
	}
	if strict.HasContent(c.b) {
		c.h.addByte(markSep)
		c.h.addJSON(strict.Of(c.b))
	}
}

// others writes an object of unknown members. It omits cache_control, which
// clients move from turn to turn.
func (c *conversation) others(v rawjson.Span) {
	for key, v := range v.Members(c.b) {
		if string(key) != "cache_control" {
			c.h.add(key)
			c.h.addByte(':')
			c.h.addJSON(v.Of(c.b))
		}
	}
}
