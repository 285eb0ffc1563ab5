package api

import (
	"bytes"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

type responses struct{ base }

func (responses) Name() string   { return NameResponses }
func (responses) traits() traits { return traits{shape: shapeResponses, joins: true} }

func (responses) field(p *parse, key []byte, v rawjson.Span) {
	r, b := p.req, p.body
	switch string(key) {
	case "input":
		p.main = v
	case "instructions":
		p.system = v
	case "tools":
		p.tools = v
		for tool := range v.Objects(b) {
			r.ServerTools = r.ServerTools || tool.Get(b, "type").Text(b) != "function"
		}
	case "store":
		r.Unstored = string(v.Of(b)) == "false"
	case "previous_response_id":
		r.PreviousResponse = v.Text(b)
	case "conversation":
		if r.Conversation = v.Text(b); v.First(b) == '{' {
			r.Conversation = v.Get(b, "id").Text(b)
		}
	case "prompt": // a template that the server keeps
		p.template = v.First(b) == '{'
	}
}

func (responses) prompt(p *parse) {
	b, r := p.body, p.req
	if r.PreviousResponse != "" || r.Conversation != "" || p.template || p.idsGiven() {
		return
	}
	raw, isText := p.main.Str(b)
	if !isText && p.main.First(b) != '[' {
		return
	}
	t := p.text(p.main.Len())
	if p.system.HasContent(b) {
		t.open(roleSystem)
		t.content(p.system)
	}
	if isText {
		t.open(roleUser)
		t.h.addString(raw)
	}
	for v := range p.main.Objects(b) {
		if !t.item(v) {
			return // the server keeps a part of the prompt
		}
	}
	p.resume = t.assistant
	p.conversed(&t)
}

type item struct {
	kind, role, content, output rawjson.Span
	call                        toolCall
}

func readItem(b []byte, v rawjson.Span) (t item) {
	v.Read(b,
		rawjson.To("type", &t.kind), rawjson.To("role", &t.role), rawjson.To("content", &t.content),
		rawjson.To("output", &t.output), rawjson.To("name", &t.call.name),
		rawjson.To("arguments", &t.call.args), rawjson.To("input", &t.call.args),
	)
	return t
}

// item writes an item. A call belongs to the assistant's message before it, if
// there is one. It returns false for a reference to what the server keeps.
func (t *conversation) item(v rawjson.Span) bool {
	it := readItem(t.b, v)
	kind, _ := it.kind.Str(t.b)
	role, ok := it.role.Str(t.b)
	switch string(kind) {
	case "", "message":
		if !ok {
			return len(kind) > 0
		}
		t.open(role)
		t.content(it.content)
	case "function_call", "custom_tool_call":
		if !t.assistant {
			t.open(roleAssistant)
		}
		t.call(it.call)
	case "function_call_output", "custom_tool_call_output":
		t.open(roleTool)
		t.content(it.output)
	case "reasoning":
	case "item_reference":
		return false
	default:
		t.open(kind)
		t.others(v)
	}
	return true
}

// event reads an event, whose data have its type, or a plain answer. The last
// event repeats the whole response, which is what the client sends back. Deltas
// only show that tokens come.
func (r responses) event(a *Answer, b []byte, i int) bool {
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
	a.fault(b, i, fail, object)
	name, _ := kind.Str(b)
	switch string(name) {
	case "": // a plain answer
		r.response(a, b, rawjson.Span{Start: i, End: end})
	case "response.completed", "response.incomplete", "response.failed":
		if response.First(b) == '{' {
			r.response(a, b, response)
		}
		if string(name) == "response.failed" {
			a.fail(errorStatus(b[i:]))
		}
	case "response.created", "response.queued", "response.in_progress":
		if a.responseID == "" {
			a.keepID(response.Get(b, "id").Text(b))
		}
	case "response.output_item.added":
		a.bearing = item.Get(b, "name").HasContent(b)
	case "error":
		a.fail(errorStatus(b[i:]))
	default:
		if bytes.HasSuffix(name, []byte(".delta")) {
			a.bearing = delta.HasContent(b)
			a.predictable = a.predictable && !bytes.HasPrefix(name, []byte("response.reasoning"))
		}
	}
	return true
}

func (r responses) response(a *Answer, b []byte, v rawjson.Span) {
	var id, status, output, usage, fail rawjson.Span
	v.Read(b, rawjson.To("id", &id), rawjson.To("status", &status), rawjson.To("output", &output),
		rawjson.To("usage", &usage), rawjson.To("error", &fail))
	a.fault(b, v.Start, fail, rawjson.Span{})
	a.keepID(id.Text(b))
	a.usage(b, usage)
	switch raw, _ := status.Str(b); string(raw) {
	case "completed", "incomplete":
		a.finished++
		a.done = true
	case "failed":
		a.fail(0)
	case "cancelled":
		a.fail(StatusAborted)
	default: // the engine computes it in the background
		return
	}
	if output.First(b) != '[' || !output.HasContent(b) {
		a.predictable = false // the engine did not repeat it
		return
	}
	if !a.first {
		a.bearing = true
	}
	if a.predictable {
		r.items(a, b, output)
	}
}

// maxResponseID is the length of the longest id that is kept, in bytes.
const maxResponseID = 1 << 10

// keepID copies the response's first id.
func (a *Answer) keepID(id string) {
	if a.responseID == "" && len(id) <= maxResponseID {
		a.responseID = strings.Clone(id)
	}
}

func (r responses) items(a *Answer, b []byte, output rawjson.Span) {
	t := conversation{h: &a.hash, b: b}
	for v := range output.Elements(b) {
		if v.First(b) != '{' || !r.comesBack(a, b, v) || !t.item(v) {
			a.predictable = false
			return
		}
		a.bound()
	}
}

// comesBack returns whether the next prompt will have an item of the output as it
// is. Templates drop reasoning, also in a message's text, and the server rewrites
// its own tools' items.
func (responses) comesBack(a *Answer, b []byte, v rawjson.Span) bool {
	it := readItem(b, v)
	switch kind, _ := it.kind.Str(b); string(kind) {
	case "function_call", "custom_tool_call":
		return true
	case "message":
	default:
		return false
	}
	for v := range it.content.Elements(b) {
		kind, txt := kindAndText(b, v)
		if string(kind) != "output_text" || a.think.saw(txt) {
			return false
		}
	}
	return it.content.First(b) == '['
}
