package canned

import (
	"encoding/json"
	"maps"

	"github.com/tidwall/gjson"
)

// messageCalled looks for a tool's result in the last message.
func messageCalled(c *call) bool {
	n := len(c.Messages)
	return n == 0 || gjson.GetBytes(c.Messages[n-1].Content, `#(type=="tool_result")`).Exists()
}

func (p *Answer) message(content []any, stop any, usage map[string]any) map[string]any {
	return map[string]any{
		"id": "msg_" + p.ID, "type": "message", "role": "assistant", "model": p.Model, "content": content,
		"stop_reason": stop, "stop_sequence": nil, "usage": usage,
	}
}

// messageUsage tells input from what was cached, as Anthropic does.
func (p *Answer) messageUsage() map[string]any {
	return map[string]any{
		"input_tokens": p.Prompt - p.Cached - p.Created, "cache_read_input_tokens": p.Cached,
		"cache_creation_input_tokens": p.Created, "output_tokens": p.Completion,
	}
}

// block returns the one block of a message, and why the message ends with it.
func (p *Answer) block(text string, input json.RawMessage) (block map[string]any, stop string) {
	if p.Tool == "" {
		if p.Reason == "length" {
			return map[string]any{"type": "text", "text": text}, "max_tokens"
		}
		return map[string]any{"type": "text", "text": text}, "end_turn"
	}
	return map[string]any{"type": "tool_use", "id": "toolu_" + p.ID, "name": p.Tool, "input": input}, "tool_use"
}

func messageWhole(p *Answer) any {
	block, stop := p.block(p.text(), json.RawMessage(toolArguments))
	doc := p.message([]any{block}, stop, p.messageUsage())
	if p.Engine != nil {
		maps.Copy(doc, p.Engine.InWhole)
	}
	return doc
}

// messageEvents have the whole prompt as input at first, as vLLM does, and
// split it at the end.
func messageEvents(p *Answer) []Event {
	var out []Event
	add := func(name string, doc map[string]any, word bool) {
		doc["type"] = name
		out = append(out, Event{name, doc, word})
	}
	block, stop := p.block("", json.RawMessage(`{}`))
	add("message_start", map[string]any{"message": p.message([]any{}, nil, map[string]any{"input_tokens": p.Prompt, "output_tokens": 0})}, false)
	add("content_block_start", map[string]any{"index": 0, "content_block": block}, p.Tool != "")
	add("ping", map[string]any{}, false)
	for _, text := range p.Pieces {
		add("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "text_delta", "text": text}}, true)
	}
	if p.Tool != "" {
		for _, arguments := range toolPieces {
			add("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "input_json_delta", "partial_json": arguments}}, true)
		}
	}
	add("content_block_stop", map[string]any{"index": 0}, false)
	add("message_delta", map[string]any{"delta": map[string]any{"stop_reason": stop, "stop_sequence": nil}, "usage": p.messageUsage()}, false)
	add("message_stop", map[string]any{}, false)
	return out
}

func countWhole(p *Answer, _ *call) any { return map[string]any{"input_tokens": p.Prompt} }
