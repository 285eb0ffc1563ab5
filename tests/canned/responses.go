package canned

import "github.com/tidwall/gjson"

// responseCalled looks for a tool's result at the end of the input.
func responseCalled(c *call) bool {
	items := gjson.ParseBytes(c.Input).Array()
	return len(items) > 0 && items[len(items)-1].Get("type").Str == "function_call_output"
}

// response returns the object that the answer is, and its events carry.
func (p *reply) response(c *call, status string, output []any) map[string]any {
	tools := make([]any, len(c.Tools))
	for i, t := range c.Tools {
		tools[i] = map[string]any{"type": "function", "name": t.Name, "parameters": map[string]any{}, "strict": false}
	}
	return map[string]any{
		"id": "resp_" + p.id, "object": "response", "created_at": 1700000000, "model": p.model, "status": status,
		"error": nil, "incomplete_details": nil, "instructions": nil, "metadata": map[string]any{}, "output": output,
		"parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto", "tools": tools, "top_p": 1.0, "usage": nil,
	}
}

// item returns the one item of the output, done or only begun.
func (p *reply) item(done bool) map[string]any {
	status := "in_progress"
	if done {
		status = "completed"
	}
	if p.tool == "" {
		content := []any{}
		if done {
			content = append(content, outputText(p.text()))
		}
		return map[string]any{"id": "msg_" + p.id, "type": "message", "role": "assistant", "status": status, "content": content}
	}
	arguments := ""
	if done {
		arguments = toolArguments
	}
	return map[string]any{
		"id": "fc_" + p.id, "type": "function_call", "call_id": "call_" + p.id, "status": status,
		"name": p.tool, "arguments": arguments,
	}
}

func outputText(text string) map[string]any {
	return map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": []any{}}
}

func responseWhole(p *reply, c *call) any {
	doc := p.response(c, "completed", []any{p.item(true)})
	doc["usage"] = map[string]any{
		"input_tokens": p.prompt, "input_tokens_details": map[string]any{"cached_tokens": p.cached},
		"output_tokens": p.completion, "output_tokens_details": map[string]any{"reasoning_tokens": 0},
		"total_tokens": p.prompt + p.completion,
	}
	return doc
}

// responseEvents are the response as it begins, its one item in pieces, and the
// response again when it is whole.
func responseEvents(p *reply, c *call) []event {
	var out []event
	add := func(name string, doc map[string]any, word bool) {
		doc["type"], doc["sequence_number"] = name, len(out)
		out = append(out, event{name, doc, word})
	}
	item := p.item(true)
	piece := func(part map[string]any) map[string]any {
		part["item_id"], part["output_index"] = item["id"], 0
		return part
	}
	begun := p.response(c, "in_progress", []any{})
	add("response.created", map[string]any{"response": begun}, false)
	add("response.in_progress", map[string]any{"response": begun}, false)
	add("response.output_item.added", map[string]any{"output_index": 0, "item": p.item(false)}, p.tool != "")
	if p.tool == "" {
		add("response.content_part.added", piece(map[string]any{"content_index": 0, "part": outputText("")}), false)
		for _, text := range p.pieces() {
			add("response.output_text.delta", piece(map[string]any{"content_index": 0, "delta": text, "logprobs": []any{}}), true)
		}
		add("response.output_text.done", piece(map[string]any{"content_index": 0, "text": p.text(), "logprobs": []any{}}), false)
		add("response.content_part.done", piece(map[string]any{"content_index": 0, "part": outputText(p.text())}), false)
	} else {
		for _, arguments := range toolPieces {
			add("response.function_call_arguments.delta", piece(map[string]any{"delta": arguments}), true)
		}
		add("response.function_call_arguments.done", piece(map[string]any{"name": p.tool, "arguments": toolArguments}), false)
	}
	add("response.output_item.done", map[string]any{"output_index": 0, "item": item}, false)
	add("response.completed", map[string]any{"response": responseWhole(p, c)}, false)
	return out
}
