package api

func (messages) begin(a *Answer) { a.beginMessage() }

// event reads an event, which has its type in it as well as before it, or a
// plain answer.
func (messages) event(a *Answer, b []byte, i int) bool {
	if b[i] != '{' {
		return false
	}
	var kind, message, block, delta, usage, content, stop, fail span
	c := enter(b, i, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			kind = v
		case "message":
			message = v
		case "content_block":
			block = v
		case "delta":
			delta = v
		case "usage":
			usage = v
		case "content":
			content = v
		case "stop_reason":
			stop = v
		case "error":
			fail = v
		}
	}
	if c.err != nil {
		return false
	}
	a.fault(b, fail)
	a.messageUsage(b, usage)
	switch name, _ := kind.str(b); string(name) {
	case "content_block_delta":
		a.blockDelta(b, delta)
	case "content_block_start":
		a.blockStart(b, block)
	case "content_block_stop":
		a.blockStop()
	case "message_start":
		a.messageUsage(b, member(b, message, "usage"))
	case "message_delta":
		a.finishReason(b, member(b, delta, "stop_reason"))
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

// member returns where an object's member is, the zero span if there is none
// or no object.
func member(b []byte, v span, name string) (m span) {
	if v.first(b) != '{' {
		return m
	}
	c := enter(b, v.start, 0)
	for c.next() {
		same := string(c.key()) == name
		if v := c.value(); same {
			m = v
		}
	}
	return m
}

// contentBlock is where the parts of a block or of its delta are.
type contentBlock struct {
	kind           []byte
	text           []byte
	partial        []byte // partial_json
	thinking, data span
	call           toolCall
}

func readBlock(b []byte, v span) (t contentBlock) {
	if v.first(b) != '{' {
		return t
	}
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			t.kind, _ = v.str(b)
		case "text":
			t.text, _ = v.str(b)
		case "partial_json":
			t.partial, _ = v.str(b)
		case "thinking":
			t.thinking = v
		case "data":
			t.data = v
		case "name":
			t.call.name = v
		case "input":
			t.call.args = v
		}
	}
	return t
}

func (a *Answer) blockStart(b []byte, v span) {
	t := readBlock(b, v)
	switch string(t.kind) {
	case "text":
		if len(t.text) > 0 {
			a.chatText(t.text)
		}
	case "tool_use":
		a.bearing, a.kept.lost = true, true
		a.calls.open = true
		if !hasMembers(b, t.call.args) {
			t.call.args = span{} // it follows in deltas
		}
		if a.steady {
			a.calls.args = arguments{}
			a.hash.addCall(b, t.call, &a.calls.args)
			a.bound()
		}
	case "thinking", "redacted_thinking":
		a.steady = false
		a.bearing = hasMembers(b, t.thinking) || hasMembers(b, t.data)
	default: // the server's own tools: not sent back as they are
		a.unlike()
		a.bearing = hasMembers(b, t.thinking) || hasMembers(b, t.data)
	}
}

func (a *Answer) blockDelta(b []byte, v span) {
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
		a.bearing = hasMembers(b, t.thinking)
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
func (a *Answer) blocks(b []byte, content span) {
	if content.first(b) != '[' {
		return
	}
	bearing := false
	c := enter(b, content.start, 0)
	for c.next() {
		a.bearing = false
		a.blockStart(b, c.value())
		a.blockStop()
		bearing = bearing || a.bearing
	}
	a.bearing = bearing
}

// messageUsage reads a usage object. Its input_tokens leaves out what was read
// from the cache or written to it. A stream's first event has one, and its
// last corrects it: vLLM gives the whole prompt first and splits it then. So
// the last word on each counts.
func (a *Answer) messageUsage(b []byte, v span) {
	if v.first(b) != '{' {
		return
	}
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "input_tokens":
			count(&a.fresh, b, v)
		case "cache_read_input_tokens":
			count(&a.cached, b, v)
		case "cache_creation_input_tokens":
			count(&a.created, b, v)
		case "output_tokens":
			count(&a.completion, b, v)
		}
	}
	if a.fresh >= 0 {
		a.prompt = a.fresh + max(a.cached, 0) + max(a.created, 0)
	}
}
