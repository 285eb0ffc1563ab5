package canned

import (
	"encoding/json"

	"github.com/tidwall/gjson"
)

// messageCalled looks for a tool's result in the last message.
func messageCalled(c *call) bool {
	n := len(c.Messages)
	return n == 0 || gjson.GetBytes(c.Messages[n-1].Content, `#(type=="tool_result")`).Exists()
}

func (p *reply) message(content []any, stop any, usage map[string]any) map[string]any {
	return map[string]any{
		"id": "msg_" + p.id, "type": "message", "role": "assistant", "model": p.model, "content": content,
		"stop_reason": stop, "stop_sequence": nil, "usage": usage,
	}
}

// messageUsage tells input from what was cached, as Anthropic does.
func (p *reply) messageUsage() map[string]any {
	return map[string]any{
		"input_tokens": p.prompt - p.cached - p.created, "cache_read_input_tokens": p.cached,
		"cache_creation_input_tokens": p.created, "output_tokens": p.completion,
	}
}

// block returns the one block of a message, and why the message ends with it.
func (p *reply) block(text string, input json.RawMessage) (block map[string]any, stop string) {
	if p.tool == "" {
		return map[string]any{"type": "text", "text": text}, "end_turn"
	}
	return map[string]any{"type": "tool_use", "id": "toolu_" + p.id, "name": p.tool, "input": input}, "tool_use"
}

func messageWhole(p *reply, _ *call) any {
	block, stop := p.block(p.text(), json.RawMessage(toolArguments))
	return p.message([]any{block}, stop, p.messageUsage())
}

// messageEvents have the whole prompt as input at first, as vLLM does, and
// split it at the end.
func messageEvents(p *reply, _ *call) []event {
	var out []event
	add := func(name string, doc map[string]any, word bool) {
		doc["type"] = name
		out = append(out, event{name, doc, word})
	}
	block, stop := p.block("", json.RawMessage(`{}`))
	add("message_start", map[string]any{"message": p.message([]any{}, nil, map[string]any{"input_tokens": p.prompt, "output_tokens": 0})}, false)
	add("content_block_start", map[string]any{"index": 0, "content_block": block}, p.tool != "")
	add("ping", map[string]any{}, false)
	for _, text := range p.pieces() {
		add("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "text_delta", "text": text}}, true)
	}
	if p.tool != "" {
		for _, arguments := range toolPieces {
			add("content_block_delta", map[string]any{"index": 0, "delta": map[string]any{"type": "input_json_delta", "partial_json": arguments}}, true)
		}
	}
	add("content_block_stop", map[string]any{"index": 0}, false)
	add("message_delta", map[string]any{"delta": map[string]any{"stop_reason": stop, "stop_sequence": nil}, "usage": p.messageUsage()}, false)
	add("message_stop", map[string]any{}, false)
	return out
}

func countWhole(p *reply, _ *call) any { return map[string]any{"input_tokens": p.prompt} }
