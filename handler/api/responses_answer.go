package api

import (
	"bytes"
	"strings"
)

// begin writes nothing: the answer's items bring their own messages.
func (responses) begin(*Answer) {}

// event reads an event, which has its type in it, or a plain answer. What the
// answer says is taken from the whole response that the last event carries:
// it is what the client sends back. Deltas only tell that tokens come.
func (responses) event(a *Answer, b []byte, i int) bool {
	if b[i] != '{' {
		return false
	}
	var kind, object, response, delta, item, fail span
	c := enter(b, i, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			kind = v
		case "object":
			object = v
		case "response":
			response = v
		case "delta":
			delta = v
		case "item":
			item = v
		case "error":
			fail = v
		}
	}
	if c.err != nil {
		return false
	}
	a.fault(b, fail)
	a.object(b, object)
	name, _ := kind.str(b)
	switch string(name) {
	case "": // a plain answer
		a.response(b, span{i, c.i})
	case "response.completed", "response.incomplete", "response.failed":
		if response.first(b) == '{' {
			a.response(b, response)
		}
		a.failed = a.failed || string(name) == "response.failed"
	case "response.created", "response.queued", "response.in_progress":
		if a.responseID == "" && response.first(b) == '{' {
			a.named(memberString(b, response, "id"))
		}
	case "response.output_item.added":
		if item.first(b) == '{' {
			a.bearing = hasMembers(b, readItem(b, item).call.name)
		}
	case "error":
		a.failed = true
	default:
		if bytes.HasSuffix(name, []byte(".delta")) {
			a.bearing = hasMembers(b, delta)
			if bytes.HasPrefix(name, []byte("response.reasoning")) {
				a.steady = false
			}
		}
	}
	return true
}

// response reads a whole response.
func (a *Answer) response(b []byte, v span) {
	var id, status, output, usage span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "id":
			id = v
		case "status":
			status = v
		case "output":
			output = v
		case "usage":
			usage = v
		case "error":
			a.fault(b, v)
		}
	}
	a.named(stringOr(b, id))
	if usage.first(b) == '{' {
		a.responseUsage(b, usage)
	}
	switch raw, _ := status.str(b); string(raw) {
	case "completed", "incomplete":
		a.finished++
		a.done = true
	case "failed", "cancelled":
		a.failed = true
	default: // it is computed in the background
		return
	}
	if output.first(b) != '[' || !hasMembers(b, output) {
		a.steady = false // the engine has not said it again
		return
	}
	if !a.first {
		a.bearing = true
	}
	if a.steady {
		a.items(b, output)
	}
}

// maxResponseID is the longest id of a response that is taken for one, in bytes.
const maxResponseID = 1 << 10

// named takes in the response's id. The text is the answer's, which does not
// stay.
func (a *Answer) named(id string) {
	if a.responseID == "" && len(id) <= maxResponseID {
		a.responseID = strings.Clone(id)
	}
}

// items writes a response's output.
func (a *Answer) items(b []byte, output span) {
	t := conversation{h: &a.hash, b: b}
	c := enter(b, output.start, 0)
	for c.next() {
		v := c.value()
		if v.first(b) != '{' || !a.comesBack(b, v) || !t.item(v) {
			a.steady = false
			return
		}
		a.bound()
	}
}

// comesBack is whether an item of the output will be in the next prompt as it
// is: reasoning is dropped by templates, and of built-in tools' items it is
// the server that knows what they become.
func (a *Answer) comesBack(b []byte, v span) bool {
	it := readItem(b, v)
	switch kind, _ := it.kind.str(b); string(kind) {
	case "function_call", "custom_tool_call":
		return true
	case "message":
		return a.spoken(b, it.content)
	}
	return false
}

// spoken is whether a message is text alone, without reasoning in it.
func (a *Answer) spoken(b []byte, content span) bool {
	if content.first(b) != '[' {
		return false
	}
	c := enter(b, content.start, 0)
	for c.next() {
		v := c.value()
		if v.first(b) != '{' {
			return false
		}
		kind, txt := kindAndText(b, v)
		if string(kind) != "output_text" || a.think.saw(txt) {
			return false
		}
	}
	return true
}

// kindAndText returns an object's members type and text, as they stand between
// their quotes.
func kindAndText(b []byte, v span) (kind, txt []byte) {
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			kind, _ = v.str(b)
		case "text":
			txt, _ = v.str(b)
		}
	}
	return kind, txt
}

func (a *Answer) responseUsage(b []byte, v span) {
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "input_tokens":
			count(&a.prompt, b, v)
		case "output_tokens":
			count(&a.completion, b, v)
		case "input_tokens_details":
			a.cachedDetail(b, v)
		}
	}
}
