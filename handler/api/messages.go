package api

import "bytes"

// messages is Anthropic's /v1/messages.
type messages struct{}

func (messages) Name() string { return "messages" }
func (messages) Work() Work   { return Generate }
func (messages) shape() shape { return shapeAnthropic }

func (messages) field(p *parse, key []byte, v span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "system":
		p.system = v
	case "tools":
		p.tools = v
	case "metadata":
		if v.first(p.body) == '{' {
			p.req.UserID = memberString(p.body, v, "user_id")
		}
	}
}

func (messages) prompt(p *parse) {
	b := p.body
	if p.main.first(b) != '[' {
		return
	}
	t := p.talk(p.main.end - p.main.start + p.system.end - p.system.start)
	t.tools(p.tools)
	hoisted := bytes.Contains(p.main.of(b), []byte(`"system"`)) // or a text of that name
	t.systemOf(p.system, p.main, hoisted)
	before := t.messages
	c := enter(b, p.main.start, 2)
	for c.next() {
		if v := c.value(); v.first(b) == '{' && (!hoisted || !isSystem(b, v)) {
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
func (t *conversation) systemOf(system, messages span, hoisted bool) {
	b := t.b
	open := func() {
		if t.messages == 0 {
			t.open(roleSystem)
		}
	}
	if hasMembers(b, system) {
		open()
		t.told(system)
	}
	if !hoisted {
		return
	}
	c := enter(b, messages.start, 0)
	for c.next() {
		if v := c.value(); v.first(b) == '{' && isSystem(b, v) {
			open()
			t.told(member(b, v, "content"))
		}
	}
}

// isSystem tells whether a message has the role system.
func isSystem(b []byte, v span) bool {
	role, _ := member(b, v, "role").str(b)
	return text(role) == "system"
}

// billing is what a block of a system prompt begins with that Claude Code
// writes anew for each request, and that engines leave out.
const billing = "x-anthropic-billing-header"

// told writes the content of a system prompt but for such blocks.
func (t *conversation) told(v span) {
	b := t.b
	if v.first(b) != '[' {
		t.content(v)
		return
	}
	c := enter(b, v.start, 0)
	for c.next() {
		v := c.value()
		if raw, ok := v.str(b); ok {
			t.h.AddString(raw)
			continue
		}
		if v.first(b) != '{' {
			continue
		}
		if _, txt := kindAndText(b, v); !bytes.HasPrefix(txt, []byte(billing)) {
			t.part(v)
		}
	}
}

// turn writes a message. An engine makes a chat of it: results of tools come
// first, as messages of their own; an assistant's calls come after its text.
func (t *conversation) turn(v span) {
	b := t.b
	var role, content span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "role":
			role = v
		case "content":
			content = v
		}
	}
	raw, _ := role.str(b)
	if content.first(b) != '[' {
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
func (t *conversation) blocks(content span, role []byte, but string) {
	c := enter(t.b, content.start, 0)
	for c.next() {
		v := c.value()
		if v.first(t.b) != '{' {
			continue
		}
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
func (t *conversation) toolUses(content span) {
	c := enter(t.b, content.start, 0)
	for c.next() {
		v := c.value()
		if v.first(t.b) != '{' {
			continue
		}
		if kind, _ := kindAndText(t.b, v); string(kind) == "tool_use" {
			t.h.addCall(t.b, readFunction(t.b, v), &arguments{})
		}
	}
}

// toolResults writes the results among a user's blocks: a message of the role
// tool with the text of each, and one of the user's with its images.
func (t *conversation) toolResults(content span) {
	c := enter(t.b, content.start, 0)
	for c.next() {
		v := c.value()
		if v.first(t.b) != '{' {
			continue
		}
		if kind, _ := kindAndText(t.b, v); string(kind) == "tool_result" {
			t.toolResult(v)
		}
	}
}

func (t *conversation) toolResult(v span) {
	b := t.b
	var content span
	c := enter(b, v.start, 0)
	for c.next() {
		same := string(c.key()) == "content"
		if v := c.value(); same {
			content = v
		}
	}
	t.open(roleTool)
	if content.first(b) != '[' {
		t.content(content)
		return
	}
	others, texts := false, 0
	c = enter(b, content.start, 0)
	for c.next() {
		v := c.value()
		if v.first(b) != '{' {
			continue
		}
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
	if b[i] != '{' {
		return false
	}
	c := enter(b, i, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "input_tokens":
			a.done = true
		case "error":
			a.fault(b, v)
		}
	}
	return c.err == nil
}
