package canned

// usageDoc is usage as chat and completions have it.
func (p *reply) usageDoc() map[string]any {
	return map[string]any{"prompt_tokens": p.prompt, "completion_tokens": p.completion, "total_tokens": p.prompt + p.completion}
}

// choices wraps choices in what stands around them.
func (p *reply) choices(object string, choices ...any) map[string]any {
	if choices == nil {
		choices = []any{}
	}
	return map[string]any{"id": "cmpl-" + p.id, "object": object, "created": 1700000000, "model": p.model, "choices": choices}
}

// choice returns one choice with a member of the given name; reason is that of
// its end, nil while it goes on.
func choice(name string, value, reason any) map[string]any {
	return map[string]any{"index": 0, name: value, "logprobs": nil, "finish_reason": reason}
}

func chatCalled(c *call) bool {
	n := len(c.Messages)
	return n == 0 || c.Messages[n-1].Role == "tool"
}

func (p *reply) toolCall(arguments string) map[string]any {
	return map[string]any{
		"id": "call_cmpl-" + p.id, "type": "function",
		"function": map[string]any{"name": p.tool, "arguments": arguments},
	}
}

func chatWhole(p *reply, _ *call) any {
	c := choice("message", map[string]any{"role": "assistant", "content": p.text()}, "stop")
	if p.tool != "" {
		c = choice("message", map[string]any{"role": "assistant", "content": nil, "tool_calls": []any{p.toolCall(toolArguments)}}, "tool_calls")
	}
	doc := p.choices("chat.completion", c)
	doc["usage"] = p.usageDoc()
	return doc
}

// chatEvents are the role, the words or the tool call one by one, the reason of
// the end, and the usage if asked for.
func chatEvents(p *reply, _ *call) []event {
	var out []event
	add := func(delta map[string]any, reason any, word bool) {
		out = append(out, event{doc: p.choices("chat.completion.chunk", choice("delta", delta, reason)), word: word})
	}
	add(map[string]any{"role": "assistant", "content": ""}, nil, false)
	for _, piece := range p.pieces() {
		add(map[string]any{"content": piece}, nil, true)
	}
	reason := "stop"
	if p.tool != "" {
		reason = "tool_calls"
		first := p.toolCall("")
		first["index"] = 0
		add(map[string]any{"tool_calls": []any{first}}, nil, true)
		for _, piece := range toolPieces {
			add(map[string]any{"tool_calls": []any{map[string]any{"index": 0, "function": map[string]any{"arguments": piece}}}}, nil, true)
		}
	}
	add(map[string]any{}, reason, false)
	return p.withUsage(out, "chat.completion.chunk")
}

// withUsage adds the chunk that reports usage, if it was asked for.
func (p *reply) withUsage(events []event, object string) []event {
	if !p.usage {
		return events
	}
	doc := p.choices(object)
	doc["usage"] = p.usageDoc()
	return append(events, event{doc: doc})
}

func textWhole(p *reply, _ *call) any {
	doc := p.choices("text_completion", choice("text", p.text(), "stop"))
	doc["usage"] = p.usageDoc()
	return doc
}

func textEvents(p *reply, _ *call) []event {
	pieces := p.pieces()
	out := make([]event, 0, len(pieces)+2)
	for _, piece := range pieces {
		out = append(out, event{doc: p.choices("text_completion", choice("text", piece, nil)), word: true})
	}
	out = append(out, event{doc: p.choices("text_completion", choice("text", "", "stop"))})
	return p.withUsage(out, "text_completion")
}
