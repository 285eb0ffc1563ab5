package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

func (messages) begin(a *Answer) { a.beginMessage() }

// event reads an event, which has its type in it as well as before it, or a
// plain answer.
func (messages) event(a *Answer, b []byte, i int) bool {
	if b[i] != '{' {
		return false
	}
	var kind, message, block, delta, usage, content, stop, fail rawjson.Span
	end := rawjson.ReadAt(b, i,
		rawjson.To("type", &kind), rawjson.To("message", &message), rawjson.To("content_block", &block),
		rawjson.To("delta", &delta), rawjson.To("usage", &usage), rawjson.To("content", &content),
		rawjson.To("stop_reason", &stop), rawjson.To("error", &fail),
	)
	if end < 0 {
		return false
	}
	a.fault(b, fail)
	a.messageUsage(b, usage)
	switch name, _ := kind.Str(b); string(name) {
	case "content_block_delta":
		a.blockDelta(b, delta)
	case "content_block_start":
		a.blockStart(b, block)
	case "content_block_stop":
		a.blockStop()
	case "message_start":
		a.messageUsage(b, message.Get(b, "usage"))
	case "message_delta":
		a.finishReason(b, delta.Get(b, "stop_reason"))
	case "message_stop":
		a.done = true
	case "message":
		a.blocks(b, content)
		a.finishReason(b, stop)
	case "error":
		a.failed = true
	}
	return true
}

// contentBlock is where the parts of a block or of its delta are.
type contentBlock struct {
	kind           []byte
	text           []byte
	partial        []byte // partial_json
	thinking, data rawjson.Span
	call           toolCall
}

func readBlock(b []byte, v rawjson.Span) (t contentBlock) {
	var kind, text, partial rawjson.Span
	v.Read(b, rawjson.To("type", &kind), rawjson.To("text", &text), rawjson.To("partial_json", &partial),
		rawjson.To("thinking", &t.thinking), rawjson.To("data", &t.data),
		rawjson.To("name", &t.call.name), rawjson.To("input", &t.call.args))
	t.kind, _ = kind.Str(b)
	t.text, _ = text.Str(b)
	t.partial, _ = partial.Str(b)
	return t
}

func (a *Answer) blockStart(b []byte, v rawjson.Span) {
	t := readBlock(b, v)
	switch string(t.kind) {
	case "text":
		if len(t.text) > 0 {
			a.chatText(t.text)
		}
	case "tool_use":
		a.bearing, a.kept.lost = true, true
		a.calls.open = true
		if !t.call.args.HasContent(b) {
			t.call.args = rawjson.Span{} // it follows in deltas
		}
		if a.steady {
			a.calls.args = arguments{}
			a.hash.addCall(b, t.call, &a.calls.args)
			a.bound()
		}
	case "thinking", "redacted_thinking":
		a.steady = false
		a.bearing = t.thinking.HasContent(b) || t.data.HasContent(b)
	default: // the server's own tools: not sent back as they are
		a.unlike()
		a.bearing = t.thinking.HasContent(b) || t.data.HasContent(b)
	}
}

func (a *Answer) blockDelta(b []byte, v rawjson.Span) {
	t := readBlock(b, v)
	switch string(t.kind) {
	case "text_delta":
		a.chatText(t.text)
	case "input_json_delta":
		if len(t.partial) == 0 {
			return
		}
		a.bearing, a.kept.lost = true, true
		if a.steady && !a.calls.open {
			a.steady = false
		}
		if a.steady {
			a.calls.args.addString(&a.hash, t.partial)
			a.bound()
		}
	case "thinking_delta":
		a.steady = false
		a.bearing = t.thinking.HasContent(b)
	}
}

// blockStop ends a block. A call without any arguments comes back with an
// empty object.
func (a *Answer) blockStop() {
	if a.steady && a.calls.open && !a.calls.args.begun() {
		a.calls.args.add(&a.hash, []byte("{}"))
	}
}

// blocks reads a plain answer's content.
func (a *Answer) blocks(b []byte, content rawjson.Span) {
	if content.First(b) != '[' {
		return
	}
	bearing := false
	for v := range content.Elements(b) {
		a.bearing = false
		a.blockStart(b, v)
		a.blockStop()
		bearing = bearing || a.bearing
	}
	a.bearing = bearing
}

// messageUsage reads a usage object. Its input_tokens leaves out what was read
// from the cache or written to it. A stream's first event has one, and its
// last corrects it: vLLM gives the whole prompt first and splits it then. So
// the last word on each counts.
func (a *Answer) messageUsage(b []byte, v rawjson.Span) {
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
