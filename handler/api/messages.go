package api

import (
	"bytes"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// messages is Anthropic's /v1/messages.
type messages struct{ base }

func (messages) Name() string { return NameMessages }
func (messages) traits() traits {
	return traits{shape: shapeAnthropic, continues: true, joins: true, joinsText: true}
}

func (messages) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "system":
		p.system = v
	case "tools":
		p.tools = v
	case "metadata":
		p.req.UserSession = sessionOfUser(v.Get(p.body, "user_id").Text(p.body))
	}
}

func (messages) prompt(p *parse) {
	b := p.body
	if p.main.First(b) != '[' {
		return
	}
	t := p.text(p.main.Len())
	if p.system.HasContent(b) {
		t.open(roleSystem)
		t.unbilled(p.system)
	}
	before := t.messages
	for v := range p.main.Objects(b) {
		t.turn(v)
	}
	if t.messages == before {
		t.messages = 0 // a system prompt alone is no prompt
	}
	p.resume = t.assistant // the answer continues that message
	p.conversed(&t)
}

// billing begins a block of a system prompt that Claude Code changes with each
// request, and that engines leave out.
const billing = "x-anthropic-billing-header"

// unbilled writes the content of a system prompt without such blocks.
func (t *conversation) unbilled(v rawjson.Span) {
	b := t.b
	if v.First(b) != '[' {
		t.content(v)
		return
	}
	for v := range v.Elements(b) {
		if raw, ok := v.Str(b); ok {
			t.h.addString(raw)
		} else if _, txt := kindAndText(b, v); v.First(b) == '{' && !bytes.HasPrefix(txt, []byte(billing)) {
			t.part(v)
		}
	}
}

// turn writes a message as the chat that engines make of it. The results of tools
// come first, as messages of their own. An assistant's calls follow its text.
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
		for v := range content.Objects(b) {
			if kind, _ := kindAndText(b, v); string(kind) == "tool_result" {
				t.toolResult(v)
			}
		}
		t.blocks(content, raw, "tool_result")
		return
	}
	t.open(raw)
	t.blocks(content, nil, "tool_use")
	for v := range content.Objects(b) {
		if kind, _ := kindAndText(b, v); string(kind) == "tool_use" {
			t.call(readFunction(b, v))
		}
	}
}

// blocks writes a content's blocks except those of one type. With a role, the
// first of them opens a message.
func (t *conversation) blocks(content rawjson.Span, role []byte, except string) {
	for v := range content.Objects(t.b) {
		kind, txt := kindAndText(t.b, v)
		if string(kind) == except || string(kind) == "text" && len(txt) == 0 {
			continue
		}
		if role != nil {
			t.open(role)
			role = nil
		}
		t.part(v)
	}
}

// toolResult writes a tool's result: a message of the role tool with its text,
// and one of the role user with its images.
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
		kind, txt := kindAndText(b, v)
		if string(kind) != "text" {
			others = true
			continue
		}
		if texts++; texts > 1 {
			t.h.add([]byte(`\n`)) // as engines join them
		}
		t.h.addString(txt)
	}
	if others {
		t.blocks(content, roleUser, "text")
	}
}

// kindAndText returns an object's type and text, as they stand between their
// quotes.
func kindAndText(b []byte, v rawjson.Span) (kind, txt []byte) {
	var k, t rawjson.Span
	v.Read(b, rawjson.To("type", &k), rawjson.To("text", &t))
	kind, _ = k.Str(b)
	txt, _ = t.Str(b)
	return kind, txt
}

func (messages) begin(a *Answer) { a.beginMessage() }

// event reads an event, whose data repeat its type, or a plain answer.
func (m messages) event(a *Answer, b []byte, i int) bool {
	var kind, message, block, delta, usage, content, stop, fail rawjson.Span
	if b[i] != '{' || rawjson.ReadAt(b, i,
		rawjson.To("type", &kind), rawjson.To("message", &message), rawjson.To("content_block", &block),
		rawjson.To("delta", &delta), rawjson.To("usage", &usage), rawjson.To("content", &content),
		rawjson.To("stop_reason", &stop), rawjson.To("error", &fail),
	) < 0 {
		return false
	}
	a.fault(b, i, fail, rawjson.Span{})
	m.messageUsage(a, b, usage)
	switch name, _ := kind.Str(b); string(name) {
	case "content_block_delta":
		m.blockDelta(a, b, delta)
	case "content_block_start":
		m.blockStart(a, b, block)
	case "content_block_stop":
		m.blockStop(a)
	case "message_start":
		m.messageUsage(a, b, message.Get(b, "usage"))
	case "message_delta":
		a.finishReason(b, delta.Get(b, "stop_reason"))
	case "message_stop":
		a.done = true
	case "message":
		bearing := false
		for v := range content.Elements(b) {
			a.bearing = false
			m.blockStart(a, b, v)
			m.blockStop(a)
			bearing = bearing || a.bearing
		}
		a.bearing = bearing
		a.finishReason(b, stop)
	case "error":
		a.fail(errorStatus(b[i:]))
	}
	return true
}

type contentBlock struct {
	kind, text     []byte
	partial        rawjson.Span // partial_json
	thinking, data rawjson.Span
	call           toolCall
}

func readBlock(b []byte, v rawjson.Span) (t contentBlock) {
	var kind, text rawjson.Span
	v.Read(b, rawjson.To("type", &kind), rawjson.To("text", &text), rawjson.To("partial_json", &t.partial),
		rawjson.To("thinking", &t.thinking), rawjson.To("data", &t.data),
		rawjson.To("name", &t.call.name), rawjson.To("input", &t.call.args))
	t.kind, _ = kind.Str(b)
	t.text, _ = text.Str(b)
	return t
}

func (messages) blockStart(a *Answer, b []byte, v rawjson.Span) {
	t := readBlock(b, v)
	if a.track.on {
		a.track.begin(string(t.kind))
	}
	switch string(t.kind) {
	case "text":
		if len(t.text) > 0 {
			a.chatText(t.text)
		}
	case "tool_use":
		a.bearing, a.kept.lost = true, true
		a.pinStream(NotResumableToolCall)
		a.beginCall(b, t.call)
		if t.call.args.HasContent(b) { // else they follow in deltas
			a.addArguments(b, t.call.args)
		}
	case "thinking", "redacted_thinking":
		a.predictable = false
		a.pinStream(NotResumableReasoning)
		a.bearing = t.thinking.HasContent(b) || t.data.HasContent(b)
	default: // clients send the server's own tools back in another form
		a.unpredictable()
		a.bearing = t.thinking.HasContent(b) || t.data.HasContent(b)
	}
}

func (messages) blockDelta(a *Answer, b []byte, v rawjson.Span) {
	t := readBlock(b, v)
	switch string(t.kind) {
	case "text_delta":
		a.chatText(t.text)
	case "input_json_delta":
		if raw, _ := t.partial.Str(b); len(raw) == 0 {
			return
		}
		a.bearing, a.kept.lost = true, true
		a.predictable = a.predictable && a.calls.open
		a.addArguments(b, t.partial)
	case "thinking_delta":
		a.predictable = false
		a.pinStream(NotResumableReasoning)
		a.bearing = t.thinking.HasContent(b)
	}
}

// blockStop ends a block. Clients send a call without arguments back with an
// empty object.
func (messages) blockStop(a *Answer) {
	if a.calls.open && rawjson.SkipSpace(a.args, 0) == len(a.args) {
		a.args = append(a.args, "{}"...)
	}
}

// messageUsage reads a usage object. Its input_tokens omits tokens that were read
// from the cache or written to it. vLLM gives the whole prompt in a stream's
// first event, and splits it in the last: the last value of each counts.
func (messages) messageUsage(a *Answer, b []byte, v rawjson.Span) {
	var fresh, cached, created, completion rawjson.Span
	v.Read(b, rawjson.To("input_tokens", &fresh), rawjson.To("cache_read_input_tokens", &cached),
		rawjson.To("cache_creation_input_tokens", &created), rawjson.To("output_tokens", &completion))
	count(&a.fresh, b, fresh)
	count(&a.cached, b, cached)
	count(&a.created, b, created)
	count(&a.completion, b, completion)
	if a.fresh >= 0 {
		a.prompt = a.fresh + max(a.cached, 0) + max(a.created, 0)
	}
}

// countTokens is Anthropic's /v1/messages/count_tokens, whose requests are those
// of messages.
type countTokens struct{ messages }

func (countTokens) Name() string  { return "count_tokens" }
func (countTokens) Work() Work    { return Count }
func (countTokens) prompt(*parse) {}

func (countTokens) event(a *Answer, b []byte, i int) bool {
	var tokens, fail rawjson.Span
	if b[i] != '{' || rawjson.ReadAt(b, i, rawjson.To("input_tokens", &tokens), rawjson.To("error", &fail)) < 0 {
		return false
	}
	a.done = a.done || tokens.Len() > 0
	a.fault(b, i, fail, rawjson.Span{})
	return true
}

const maxUserID = 4 << 10 // bytes

// sessionOfUser returns the session in metadata.user_id of Anthropic's Messages; empty if
// there is none. Claude Code writes it in one of two forms:
//
//	{"device_id":"...","account_uuid":"...","session_id":"<session>"}
//	user_<hash>_account_<uuid>_session_<session>
//
// Older versions write the second form. Other user ids name a user or a device, which many
// conversations share.
func sessionOfUser(id string) string {
	if len(id) > maxUserID {
		return ""
	}
	if strings.HasPrefix(id, "user_") {
		if i := strings.LastIndex(id, "_session_"); i >= 0 {
			return strings.TrimSpace(id[i+len("_session_"):])
		}
		return ""
	}
	if session := gjson.Get(id, "session_id"); gjson.Valid(id) && session.Type == gjson.String {
		return strings.TrimSpace(session.Str)
	}
	return ""
}
