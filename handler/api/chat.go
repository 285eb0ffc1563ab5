package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// chat is /v1/chat/completions.
type chat struct{}

func (chat) Name() string { return "chat" }
func (chat) Work() Work   { return Generate }
func (chat) shape() shape { return shapeOpenAI }

func (chat) field(p *parse, key []byte, v rawjson.Span) {
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
		p.noTop = v.IsNull(p.body)
	}
}

func (chat) prompt(p *parse) {
	if p.ids.HasContent(p.body) { // it takes the place of the template's output
		p.input(p.ids)
		// what takes the places of images is not in the ids
		p.unlike = p.unlike || showsMedia(p.main.Of(p.body))
		return
	}
	p.chat(p.main)
}

// chat reads a prompt that is a list of messages.
func (p *parse) chat(list rawjson.Span) {
	b := p.body
	if list.First(b) != '[' {
		return
	}
	t := p.talk(list.End - list.Start)
	t.tools(p.tools)
	t.tools(p.functions)
	c := rawjson.Enter(b, list.Start)
	for c.Next() {
		if b[c.At] != '{' {
			c.Value()
			continue
		}
		if c.At = t.message(c.At); c.At < 0 {
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
	p.begin(size + p.tools.End - p.tools.Start)
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
	var role, content, calls, call rawjson.Span
	end := rawjson.ReadAt(b, i,
		rawjson.To("role", &role), rawjson.To("content", &content), rawjson.To("tool_calls", &calls),
		rawjson.To("function_call", &call),
	)
	if end < 0 {
		return -1
	}
	raw, _ := role.Str(b)
	t.open(raw)
	if raw, ok := content.Str(b); ok {
		t.h.AddString(raw)
	} else {
		t.content(content)
	}
	t.calls(calls)
	if call.First(b) == '{' {
		t.h.addCall(b, readFunction(b, call), &arguments{})
	}
	return end
}

// calls writes a message's tool_calls.
func (t *conversation) calls(v rawjson.Span) {
	for v := range v.Objects(t.b) {
		t.h.addCall(t.b, readCall(t.b, v), &arguments{})
	}
}
