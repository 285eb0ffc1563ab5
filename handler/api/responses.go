package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// responses is OpenAI's /v1/responses.
type responses struct{}

func (responses) Name() string { return "responses" }
func (responses) Work() Work   { return Generate }
func (responses) shape() shape { return shapeResponses }

func (responses) field(p *parse, key []byte, v rawjson.Span) {
	r, b := p.req, p.body
	switch string(key) {
	case "input":
		p.main = v
	case "instructions":
		p.system = v
	case "tools":
		p.tools = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "store":
		r.Unstored = string(v.Of(b)) == "false"
	case "previous_response_id":
		r.PreviousResponse = v.Text(b)
	case "conversation":
		if r.Conversation = v.Text(b); v.First(b) == '{' {
			r.Conversation = v.Get(b, "id").Text(b)
		}
	case "prompt": // one that is kept by the server
		p.template = v.First(b) == '{'
	}
}

func (responses) prompt(p *parse) {
	b, r := p.body, p.req
	if r.PreviousResponse != "" || r.Conversation != "" || p.template {
		return
	}
	if p.ids.HasContent(b) {
		p.input(p.ids)
		return
	}
	if f := p.main.First(b); f != '"' && f != '[' {
		return
	}
	t := p.talk(p.main.End - p.main.Start + p.system.End - p.system.Start)
	t.tools(p.tools)
	t.system(p.system)
	if raw, ok := p.main.Str(b); ok {
		t.open(roleUser)
		t.h.AddString(raw)
		p.said(&t)
		return
	}
	for v := range p.main.Objects(b) {
		if !t.item(v) {
			return // a part of the prompt is kept by the server
		}
	}
	p.resume = t.assistant
	p.said(&t)
}

// system writes a system prompt that stands apart from the messages.
func (t *conversation) system(v rawjson.Span) {
	if v.HasContent(t.b) {
		t.open(roleSystem)
		t.content(v)
	}
}

// item is where the parts of an item of a response's input or output are.
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

// item writes one. A call belongs to the assistant's message before it, where
// there is one. It returns false for a reference to what the server keeps.
func (t *conversation) item(v rawjson.Span) bool {
	it := readItem(t.b, v)
	kind, _ := it.kind.Str(t.b)
	role, said := it.role.Str(t.b)
	switch string(kind) {
	case "", "message":
		if !said {
			return len(kind) > 0
		}
		t.open(role)
		t.content(it.content)
	case "function_call", "custom_tool_call":
		if !t.assistant {
			t.open(roleAssistant)
		}
		t.h.addCall(t.b, it.call, &arguments{})
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
