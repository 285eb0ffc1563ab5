package api

import (
	"bytes"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
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
	var kind, object, response, delta, item, fail rawjson.Span
	end := rawjson.ReadAt(b, i,
		rawjson.To("type", &kind), rawjson.To("object", &object), rawjson.To("response", &response),
		rawjson.To("delta", &delta), rawjson.To("item", &item), rawjson.To("error", &fail),
	)
	if end < 0 {
		return false
	}
	a.fault(b, fail)
	a.object(b, object)
	name, _ := kind.Str(b)
	switch string(name) {
	case "": // a plain answer
		a.response(b, rawjson.Span{Start: i, End: end})
	case "response.completed", "response.incomplete", "response.failed":
		if response.First(b) == '{' {
			a.response(b, response)
		}
		a.failed = a.failed || string(name) == "response.failed"
	case "response.created", "response.queued", "response.in_progress":
		if a.responseID == "" {
			a.named(response.Get(b, "id").Text(b))
		}
	case "response.output_item.added":
		a.bearing = item.Get(b, "name").HasContent(b)
	case "error":
		a.failed = true
	default:
		if bytes.HasSuffix(name, []byte(".delta")) {
			a.bearing = delta.HasContent(b)
			if bytes.HasPrefix(name, []byte("response.reasoning")) {
				a.steady = false
			}
		}
	}
	return true
}

// response reads a whole response.
func (a *Answer) response(b []byte, v rawjson.Span) {
	var id, status, output, usage, fail rawjson.Span
	v.Read(b, rawjson.To("id", &id), rawjson.To("status", &status), rawjson.To("output", &output),
		rawjson.To("usage", &usage), rawjson.To("error", &fail))
	a.fault(b, fail)
	a.named(id.Text(b))
	a.responseUsage(b, usage)
	switch raw, _ := status.Str(b); string(raw) {
	case "completed", "incomplete":
		a.finished++
		a.done = true
	case "failed", "cancelled":
		a.failed = true
	default: // it is computed in the background
		return
	}
	if output.First(b) != '[' || !output.HasContent(b) {
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
func (a *Answer) items(b []byte, output rawjson.Span) {
	t := conversation{h: &a.hash, b: b}
	for v := range output.Elements(b) {
		if v.First(b) != '{' || !a.comesBack(b, v) || !t.item(v) {
			a.steady = false
			return
		}
		a.bound()
	}
}

// comesBack is whether an item of the output will be in the next prompt as it
// is: reasoning is dropped by templates, and of built-in tools' items it is
// the server that knows what they become.
func (a *Answer) comesBack(b []byte, v rawjson.Span) bool {
	it := readItem(b, v)
	switch kind, _ := it.kind.Str(b); string(kind) {
	case "function_call", "custom_tool_call":
		return true
	case "message":
		return a.spoken(b, it.content)
	}
	return false
}

// spoken is whether a message is text alone, without reasoning in it.
func (a *Answer) spoken(b []byte, content rawjson.Span) bool {
	if content.First(b) != '[' {
		return false
	}
	for v := range content.Elements(b) {
		if v.First(b) != '{' {
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
func kindAndText(b []byte, v rawjson.Span) (kind, txt []byte) {
	var k, t rawjson.Span
	v.Read(b, rawjson.To("type", &k), rawjson.To("text", &t))
	kind, _ = k.Str(b)
	txt, _ = t.Str(b)
	return kind, txt
}

func (a *Answer) responseUsage(b []byte, v rawjson.Span) {
	var prompt, completion, details rawjson.Span
	v.Read(b, rawjson.To("input_tokens", &prompt), rawjson.To("output_tokens", &completion),
		rawjson.To("input_tokens_details", &details))
	count(&a.prompt, b, prompt)
	count(&a.completion, b, completion)
	count(&a.cached, b, details.Get(b, "cached_tokens"))
}
