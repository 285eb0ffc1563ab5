package canned

import "github.com/tidwall/gjson"

// responseCalled looks for a tool's result at the end of the input.
func responseCalled(c *call) bool {
	items := gjson.ParseBytes(c.Input).Array()
	return len(items) > 0 && items[len(items)-1].Get("type").Str == "function_call_output"
}

// response returns the object that the answer is, and its events carry.
func (p *Answer) response(status string, output []any) map[string]any {
	return map[string]any{
		"id": "resp_" + p.ID, "object": "response", "created_at": p.Begun, "model": p.Model, "status": status,
		"error": nil, "incomplete_details": nil, "instructions": nil, "metadata": map[string]any{}, "output": output,
		"parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto", "tools": append([]any{}, p.tools...), "top_p": 1.0, "usage": nil,
	}
}

// item returns the one item of the output, done or only begun.
func (p *Answer) item(done bool) map[string]any {
	status := "in_progress"
	if done {
		status = "completed"
	}
	if p.Tool == "" {
		content := []any{}
		if done {
			content = append(content, outputText(p.text()))
		}
		return map[string]any{"id": "msg_" + p.ID, "type": "message", "role": "assistant", "status": status, "content": content}
	}
	arguments := ""
	if done {
		arguments = toolArguments
	}
	return map[string]any{
		"id": "fc_" + p.ID, "type": "function_call", "call_id": "call_" + p.ID, "status": status,
		"name": p.Tool, "arguments": arguments,
	}
}

func outputText(text string) map[string]any {
	return map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": []any{}}
}

func responseWhole(p *Answer) any {
	status := "completed"
	if p.Reason == "length" {
		status = "incomplete"
	}
	doc := p.response(status, []any{p.item(true)})
	doc["usage"] = map[string]any{
		"input_tokens": p.Prompt, "input_tokens_details": map[string]any{"cached_tokens": p.Cached},
		"output_tokens": p.Completion, "output_tokens_details": map[string]any{"reasoning_tokens": 0},
		"total_tokens": p.Prompt + p.Completion,
	}
	return doc
}

// responseEvents are the response as it begins, its one item in pieces, and the
// response again when it is whole.
func responseEvents(p *Answer) []Event {
	var out []Event
	add := func(name string, doc map[string]any, word bool) {
		doc["type"], doc["sequence_number"] = name, len(out)
		out = append(out, Event{name, doc, word})
	}
	item := p.item(true)
	piece := func(part map[string]any) map[string]any {
		part["item_id"], part["output_index"] = item["id"], 0
		return part
	}
	begun := p.response("in_progress", []any{})
	add("response.created", map[string]any{"response": begun}, false)
	add("response.in_progress", map[string]any{"response": begun}, false)
	add("response.output_item.added", map[string]any{"output_index": 0, "item": p.item(false)}, p.Tool != "")
	if p.Tool == "" {
		add("response.content_part.added", piece(map[string]any{"content_index": 0, "part": outputText("")}), false)
		for _, text := range p.Pieces {
			add("response.output_text.delta", piece(map[string]any{"content_index": 0, "delta": text, "logprobs": []any{}}), true)
		}
		add("response.output_text.done", piece(map[string]any{"content_index": 0, "text": p.text(), "logprobs": []any{}}), false)
		add("response.content_part.done", piece(map[string]any{"content_index": 0, "part": outputText(p.text())}), false)
	} else {
		for _, arguments := range toolPieces {
			add("response.function_call_arguments.delta", piece(map[string]any{"delta": arguments}), true)
		}
		add("response.function_call_arguments.done", piece(map[string]any{"name": p.Tool, "arguments": toolArguments}), false)
	}
	add("response.output_item.done", map[string]any{"output_index": 0, "item": item}, false)
	add("response.completed", map[string]any{"response": responseWhole(p)}, false)
	return out
}
