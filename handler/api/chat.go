package api

import "bytes"

// chat is /v1/chat/completions.
type chat struct{}

func (chat) Name() string { return "chat" }
func (chat) Work() Work   { return Generate }
func (chat) shape() shape { return shapeOpenAI }

func (chat) field(p *parse, key []byte, v span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "tools":
		p.tools = v
	case "functions":
		p.functions = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "top_logprobs":
		p.noTop = isNull(v.of(p.body))
	}
}

func (chat) prompt(p *parse) {
	if hasMembers(p.body, p.ids) { // it takes the place of the template's output
		p.input(p.ids)
		// what takes the places of images is not in the ids
		p.unlike = p.unlike || showsMedia(p.main.of(p.body))
		return
	}
	p.chat(p.main)
}

// chat reads a prompt that is a list of messages.
func (p *parse) chat(list span) {
	b := p.body
	if list.first(b) != '[' {
		return
	}
	t := p.talk(list.end - list.start)
	t.tools(p.tools)
	t.tools(p.functions)
	c := enter(b, list.start, 2)
	for c.next() {
		if b[c.i] != '{' {
			c.value()
			continue
		}
		if c.i = t.message(c.i); c.i < 0 {
			break
		}
	}
	p.said(&t)
}

// showsMedia tells whether messages may have parts that are not text.
func showsMedia(messages []byte) bool {
	for _, kind := range [...]string{"image", "video", "audio", "file"} {
		if bytes.Contains(messages, []byte(kind)) {
			return true
		}
	}
	return false
}

// talk begins a conversation of about size bytes of JSON.
func (p *parse) talk(size int) conversation {
	p.begin(size + p.tools.end - p.tools.start)
	return conversation{h: &p.hash, b: p.body, seed: p.opt.Seed}
}

// said notes a conversation that has been written, if there is one.
func (p *parse) said(t *conversation) {
	if !t.sealed {
		t.seal()
	}
	p.req.Media, p.req.MediaTokens, p.req.MediaEnd = t.media, t.mediaTokens, t.mediaEnd
	p.unlike = p.unlike || t.over
	if t.messages > 0 {
		p.req.Kind = Text
		p.req.Bytes = p.hash.Bytes()
	}
}

// message writes the message at b[i] and returns the index behind it, or -1
// if it is malformed. Its members come in any order, so they are found first.
func (t *conversation) message(i int) int {
	b := t.b
	var role, content, calls, call span
	c := enter(b, i, 3)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "role":
			role = v
		case "content":
			content = v
		case "tool_calls":
			calls = v
		case "function_call":
			call = v
		}
	}
	if c.err != nil {
		return -1
	}
	raw, _ := role.str(b)
	t.open(raw)
	if raw, ok := content.str(b); ok {
		t.h.AddString(raw)
	} else {
		t.content(content)
	}
	if calls.first(b) == '[' {
		t.calls(calls)
	}
	if call.first(b) == '{' {
		t.h.addCall(b, readFunction(b, call), &arguments{})
	}
	return c.i
}

// calls writes a message's tool_calls.
func (t *conversation) calls(v span) {
	c := enter(t.b, v.start, 0)
	for c.next() {
		v := c.value()
		if v.first(t.b) == '{' {
			t.h.addCall(t.b, readCall(t.b, v), &arguments{})
		}
	}
}
