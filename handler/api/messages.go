package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// messages is Anthropic's /v1/messages.
type messages struct{}

func (messages) Name() string { return "messages" }
func (messages) Work() Work   { return Generate }
func (messages) shape() shape { return shapeAnthropic }

func (messages) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "system":
		p.system = v
	case "tools":
		p.tools = v
	case "metadata":
		if v.First(p.body) == '{' {
			p.req.UserID = v.Get(p.body, "user_id").Text(p.body)
		}
	}
}

func (messages) prompt(p *parse) {
	b := p.body
	if p.main.First(b) != '[' {
		return
	}
	t := p.talk(p.main.End - p.main.Start + p.system.End - p.system.Start)
	t.tools(p.tools)
	hoisted := bytes.Contains(p.main.Of(b), []byte(`"system"`)) // or a text of that name
	t.systemOf(p.system, p.main, hoisted)
	before := t.messages
	for v := range p.main.Objects(b) {
		if !hoisted || !isSystem(b, v) {
			t.turn(v)
		}
	}
	if t.messages == before {
		t.messages = 0 // a system prompt alone is no prompt
	}
	p.resume = t.assistant // the answer goes on with that message
	p.said(&t)
}

// systemOf writes the system prompt. Messages of the role system, wherever they
// stand, belong to it: engines move them there (vLLM, entrypoints/anthropic/
// serving.py).
func (t *conversation) systemOf(system, messages rawjson.Span, hoisted bool) {
	b := t.b
	open := func() {
		if t.messages == 0 {
			t.open(roleSystem)
		}
	}
	if system.HasContent(b) {
		open()
		t.told(system)
	}
	if !hoisted {
		return
	}
	for v := range messages.Objects(b) {
		if isSystem(b, v) {
			open()
			t.told(v.Get(b, "content"))
		}
	}
}

// isSystem tells whether a message has the role system.
func isSystem(b []byte, v rawjson.Span) bool {
	return v.Get(b, "role").Text(b) == "system"
}

// billing is what a block of a system prompt begins with that Claude Code
// writes anew for each request, and that engines leave out.
const billing = "x-anthropic-billing-header"

// told writes the content of a system prompt but for such blocks.
func (t *conversation) told(v rawjson.Span) {
	b := t.b
	if v.First(b) != '[' {
		t.content(v)
		return
	}
	for v := range v.Elements(b) {
		if raw, ok := v.Str(b); ok {
			t.h.AddString(raw)
			continue
		}
		if v.First(b) != '{' {
			continue
		}
		if _, txt := kindAndText(b, v); !bytes.HasPrefix(txt, []byte(billing)) {
			t.part(v)
		}
	}
}

// turn writes a message. An engine makes a chat of it: results of tools come
// first, as messages of their own; an assistant's calls come after its text.
func (t *conversation) turn(v rawjson.Span) {
	b := t.b
	var role, content rawjson.Span
	v.Read(b, rawjson.To("role", &role), rawjson.To("content", &content))
	raw, _ := role.Str(b)
	if content.First(b) != '[' {
		t.open(raw)
		t.content(content)
		return
	}
	if string(raw) == "user" {
		t.toolResults(content)
		t.blocks(content, raw, "tool_result")
		return
	}
	t.open(raw)
	t.blocks(content, nil, "tool_use")
	t.toolUses(content)
}

// blocks writes a content's blocks but those of one type. With a role their
// message is opened for the first of them.
func (t *conversation) blocks(content rawjson.Span, role []byte, but string) {
	for v := range content.Objects(t.b) {
		kind, txt := kindAndText(t.b, v)
		if string(kind) == but || string(kind) == "text" && len(txt) == 0 {
			continue
		}
		if role != nil {
			t.open(role)
			role = nil
		}
		t.part(v)
	}
}

// toolUses writes the calls among an assistant's blocks.
func (t *conversation) toolUses(content rawjson.Span) {
	for v := range content.Objects(t.b) {
		if kind, _ := kindAndText(t.b, v); string(kind) == "tool_use" {
			t.h.addCall(t.b, readFunction(t.b, v), &arguments{})
		}
	}
}

// toolResults writes the results among a user's blocks: a message of the role
// tool with the text of each, and one of the user's with its images.
func (t *conversation) toolResults(content rawjson.Span) {
	for v := range content.Objects(t.b) {
		if kind, _ := kindAndText(t.b, v); string(kind) == "tool_result" {
			t.toolResult(v)
		}
	}
}

func (t *conversation) toolResult(v rawjson.Span) {
	b := t.b
	content := v.Get(b, "content")
	t.open(roleTool)
	if content.First(b) != '[' {
		t.content(content)
		return
	}
	others, texts := false, 0
	for v := range content.Objects(b) {
		if kind, txt := kindAndText(b, v); string(kind) == "text" {
			if texts++; texts > 1 {
				t.h.Add([]byte(`\n`)) // as engines join them
			}
			t.h.AddString(txt)
		} else {
			others = true
		}
	}
	if others {
		t.blocks(content, roleUser, "text")
	}
}

// countTokens is Anthropic's /v1/messages/count_tokens: the request of
// messages, for which nothing is computed.
type countTokens struct{ messages }

func (countTokens) Name() string { return "count_tokens" }
func (countTokens) Work() Work   { return Count }

func (countTokens) prompt(*parse) {}

func (countTokens) event(a *Answer, b []byte, i int) bool {
	var tokens, fail rawjson.Span
	if b[i] != '{' || rawjson.ReadAt(b, i, rawjson.To("input_tokens", &tokens), rawjson.To("error", &fail)) < 0 {
		return false
	}
	a.done = a.done || tokens.Len() > 0
	a.fault(b, fail)
	return true
}
