package api

// responses is OpenAI's /v1/responses.
type responses struct{}

func (responses) Name() string { return "responses" }
func (responses) Work() Work   { return Generate }
func (responses) shape() shape { return shapeResponses }

func (responses) field(p *parse, key []byte, v span) {
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
		r.Unstored = string(v.of(b)) == "false"
	case "previous_response_id":
		r.PreviousResponse = stringOr(b, v)
	case "conversation":
		r.Conversation = stringOr(b, v)
		if v.first(b) == '{' {
			r.Conversation = memberString(b, v, "id")
		}
	case "prompt": // one that is kept by the server
		p.template = v.first(b) == '{'
	}
}

func (responses) prompt(p *parse) {
	b, r := p.body, p.req
	if r.PreviousResponse != "" || r.Conversation != "" || p.template {
		return
	}
	if hasMembers(b, p.ids) {
		p.input(p.ids)
		return
	}
	if f := p.main.first(b); f != '"' && f != '[' {
		return
	}
	t := p.talk(p.main.end - p.main.start + p.system.end - p.system.start)
	t.tools(p.tools)
	t.system(p.system)
	if raw, ok := p.main.str(b); ok {
		t.open(roleUser)
		t.h.AddString(raw)
		p.said(&t)
		return
	}
	c := enter(b, p.main.start, 2)
	for c.next() {
		v := c.value()
		if v.first(b) == '{' && !t.item(v) {
			return // a part of the prompt is kept by the server
		}
	}
	p.resume = t.assistant
	p.said(&t)
}

// system writes a system prompt that stands apart from the messages.
func (t *conversation) system(v span) {
	if hasMembers(t.b, v) {
		t.open(roleSystem)
		t.content(v)
	}
}

// item is where the parts of an item of a response's input or output are.
type item struct {
	kind, role, content, output span
	call                        toolCall
}

func readItem(b []byte, v span) (t item) {
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			t.kind = v
		case "role":
			t.role = v
		case "content":
			t.content = v
		case "output":
			t.output = v
		case "name":
			t.call.name = v
		case "arguments", "input":
			t.call.args = v
		}
	}
	return t
}

// item writes one. A call belongs to the assistant's message before it, where
// there is one. It returns false for a reference to what the server keeps.
func (t *conversation) item(v span) bool {
	it := readItem(t.b, v)
	kind, _ := it.kind.str(t.b)
	role, said := it.role.str(t.b)
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

// memberString returns the string that an object's member is, or "".
func memberString(b []byte, v span, name string) (s string) {
	c := enter(b, v.start, 0)
	for c.next() {
		same := string(c.key()) == name
		if v := c.value(); same {
			s = stringOr(b, v)
		}
	}
	return s
}
