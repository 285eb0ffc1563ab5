package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

type chat struct{ base }

func (chat) Name() string { return NameChat }
func (chat) traits() traits {
	return traits{asksUsage: true, continues: true, joins: true, joinsText: true, object: "chat.completion", chunk: "chat.completion.chunk"}
}

func (chat) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "tools":
		p.tools = v
	case "functions":
		p.functions = v
	case "top_logprobs":
		p.noTop = v.IsNull(p.body)
	}
}

func (chat) prompt(p *parse) {
	// With echo, vLLM sets prompt_logprobs from top_logprobs (default 0), and
	// computes the whole prompt.
	p.req.SkipsCache = p.req.SkipsCache || p.echo && !p.noTop
	if p.idsGiven() { // in place of the template's output
		// The ids do not show which images take the places of their tokens.
		p.opaque = p.opaque || showsMedia(p.main.Of(p.body))
		return
	}
	p.chat(p.main)
}

func (p *parse) chat(list rawjson.Span) {
	b := p.body
	if list.First(b) != '[' {
		return
	}
	t := p.text(list.Len())
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
	p.conversed(&t)
}

// showsMedia returns whether messages may have parts that are not text.
func showsMedia(messages []byte) bool {
	for _, kind := range [...]string{"image", "video", "audio", "file"} {
		if bytes.Contains(messages, []byte(kind)) {
			return true
		}
	}
	return false
}

// message writes the message at b[i] and returns the index behind it, or -1
// if it is malformed. Its members may have any order.
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
	t.content(content)
	for v := range calls.Objects(b) {
		t.call(readCall(b, v))
	}
	if call.First(b) == '{' {
		t.call(readFunction(b, call))
	}
	return end
}

func (chat) begin(a *Answer) { a.beginMessage() }

// beginMessage opens the message that the client will send back.
func (a *Answer) beginMessage() {
	a.hash.addByte(markMessage)
	a.hash.add(roleAssistant)
	a.hash.addByte(markSep)
}

func (chat) event(a *Answer, b []byte, i int) bool { return a.chunk(b, i) }

// delta reads what a chunk adds to the message, or the message of a plain
// answer. As in a prompt, it writes text before tool calls.
func (a *Answer) delta(b []byte, v rawjson.Span) {
	var content, calls rawjson.Span
	for key, v := range v.Members(b) {
		switch string(key) {
		case "content":
			content = v
		case "tool_calls":
			calls = v
		case "role":
			if raw, ok := v.Str(b); ok && len(raw) > 0 && string(raw) != "assistant" {
				a.unpredictable()
			}
		case "reasoning", "reasoning_content", "reasoning_details", "thinking":
			if v.HasContent(b) {
				a.bearing, a.predictable = true, false
				a.pinStream(NotResumableReasoning)
			}
		case "refusal", "audio", "function_call":
			if v.HasContent(b) {
				a.bearing = true
				a.unpredictable()
			}
		}
	}
	if raw, ok := content.Str(b); ok {
		a.chatText(raw)
	} else if content.HasContent(b) {
		a.bearing = true
		a.unpredictable() // clients send parts back in another form
	}
	a.toolCalls(b, calls)
}
