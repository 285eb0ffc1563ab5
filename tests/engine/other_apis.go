package engine

import (
	"encoding/json"
	"fmt"
)

// shape is the API of an inference.
type shape int

const (
	notInference shape = iota
	completions
	chats
	responses
	messages
	generate
	tokensIn
)

var shapes = map[string]shape{
	"/v1/completions": completions, "/v1/chat/completions": chats, "/v1/responses": responses, "/v1/messages": messages,
}

// shape returns the API of a path. Only an SGLang has /generate, and only a vLLM
// /inference/v1/generate.
func (c *Config) shape(path string) shape {
	switch {
	case path == "/generate" && (c.Flavour == SGLang || c.Flavour == OldSGLang):
		return generate
	case path == "/inference/v1/generate" && c.Flavour == VLLM:
		return tokensIn
	}
	return shapes[path]
}

// otherAPIs are the members by which the responses and messages APIs say what
// chats say otherwise.
type otherAPIs struct {
	Instructions    string          `json:"instructions"`
	Input           json.RawMessage `json:"input"`
	MaxOutputTokens *int            `json:"max_output_tokens"`
	System          content         `json:"system"`
}

// asChat says in a chat's members what a request of another API says.
func (r *request) asChat(s shape) *apiError {
	system := string(r.System)
	if s == responses {
		system = r.Instructions
		r.MaxTokens = r.MaxOutputTokens
		var text string
		if json.Unmarshal(r.Input, &text) == nil {
			r.Messages = []message{{Role: "user", Content: content(text)}}
		} else if err := json.Unmarshal(r.Input, &r.Messages); err != nil {
			return invalid("input: %v", err)
		}
	}
	for i, m := range r.Messages {
		if m.Role == "" {
			return badRequest("item %d: the model takes messages only", i)
		}
	}
	if system != "" {
		r.Messages = append([]message{{Role: "system", Content: content(system)}}, r.Messages...)
	}
	return nil
}

type object = map[string]any

// event appends an event of the responses or the messages API.
func (a *answer) event(buf []byte, name string, v object) []byte {
	v["type"] = name
	if a.shape == responses {
		v["sequence_number"] = a.events
		a.events++
	}
	data, _ := json.Marshal(v)
	return fmt.Appendf(buf, "event: %s\ndata: %s\n\n", name, data)
}

// appendOther is appendChunk for the responses and messages APIs.
func (a *answer) appendOther(buf []byte, i int) []byte {
	if i == 0 {
		buf = a.appendStart(buf)
	}
	t := text(a.answer[i : i+1])
	if a.shape == responses {
		return a.event(buf, "response.output_text.delta", object{"content_index": 0, "output_index": 0, "item_id": a.id, "delta": t, "logprobs": []any{}})
	}
	return a.event(buf, "content_block_delta", object{"index": 0, "delta": object{"type": "text_delta", "text": t}})
}

// appendStart appends what comes before the text. The messages API counts the
// whole prompt there, and splits the count at the end.
func (a *answer) appendStart(buf []byte) []byte {
	if a.shape == responses {
		begun := a.response("in_progress", []any{})
		buf = a.event(buf, "response.created", object{"response": begun})
		buf = a.event(buf, "response.in_progress", object{"response": begun})
		buf = a.event(buf, "response.output_item.added", object{"output_index": 0, "item": a.item("in_progress", []any{})})
		return a.event(buf, "response.content_part.added", object{"content_index": 0, "output_index": 0, "item_id": a.id, "part": outputText("")})
	}
	start := a.message([]any{}, nil, object{"input_tokens": len(a.prompt.Tokens), "output_tokens": 0})
	buf = a.event(buf, "message_start", object{"message": start})
	return a.event(buf, "content_block_start", object{"index": 0, "content_block": object{"type": "text", "text": ""}})
}

// appendOtherEnd is appendEnd for the responses and messages APIs.
func (a *answer) appendOtherEnd(buf []byte, cached int) []byte {
	if a.shape == responses {
		part, done := outputText(text(a.answer)), a.wholeResponse(cached)
		at := func(v object) object {
			v["output_index"], v["content_index"], v["item_id"] = 0, 0, a.id
			return v
		}
		buf = a.event(buf, "response.output_text.done", at(object{"text": text(a.answer), "logprobs": []any{}}))
		buf = a.event(buf, "response.content_part.done", at(object{"part": part}))
		buf = a.event(buf, "response.output_item.done", object{"output_index": 0, "item": a.item("completed", []any{part})})
		return a.event(buf, "response.completed", object{"response": done})
	}
	buf = a.event(buf, "content_block_stop", object{"index": 0})
	buf = a.event(buf, "message_delta", object{"delta": object{"stop_reason": a.stopReason(), "stop_sequence": nil}, "usage": a.messageUsage(cached)})
	return a.event(buf, "message_stop", object{})
}

// otherWhole is whole for the responses and messages APIs.
func (a *answer) otherWhole(cached int) []byte {
	v := a.wholeResponse
	if a.shape == messages {
		v = a.wholeMessage
	}
	doc := v(cached)
	if a.transfer != nil {
		doc["kv_transfer_params"] = a.transfer
	}
	out, _ := json.Marshal(doc)
	return out
}

func (a *answer) response(status string, output []any) object {
	return object{
		"id": "resp_" + a.id, "object": "response", "created_at": a.created, "model": a.model, "status": status, "output": output,
		"parallel_tool_calls": true, "tool_choice": "none", "tools": []any{}, "usage": nil,
	}
}

func (a *answer) item(status string, parts []any) object {
	return object{"id": "msg_" + a.id, "type": "message", "role": "assistant", "status": status, "content": parts}
}

func outputText(text string) object {
	return object{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": nil}
}

func (a *answer) wholeResponse(cached int) object {
	status := "completed"
	if a.reason == "length" {
		status = "incomplete"
	}
	doc := a.response(status, []any{a.item("completed", []any{outputText(text(a.answer))})})
	prompt, said := len(a.prompt.Tokens), len(a.answer)
	doc["usage"] = object{
		"input_tokens": prompt, "input_tokens_details": object{"cached_tokens": cached},
		"output_tokens": said, "output_tokens_details": object{"reasoning_tokens": 0}, "total_tokens": prompt + said,
	}
	return doc
}

func (a *answer) message(parts []any, stop any, usage object) object {
	return object{"id": a.id, "type": "message", "role": "assistant", "model": a.model, "content": parts, "stop_reason": stop, "usage": usage}
}

func (a *answer) wholeMessage(cached int) object {
	return a.message([]any{object{"type": "text", "text": text(a.answer)}}, a.stopReason(), a.messageUsage(cached))
}

// messageUsage tells the prompt's tokens apart: cached ones, those of the full
// blocks that it added to the cache, and the rest.
func (a *answer) messageUsage(cached int) object {
	n := len(a.prompt.Tokens)
	created := max(0, n/a.blockSize*a.blockSize-cached)
	return object{
		"input_tokens": n - cached - created, "output_tokens": len(a.answer),
		"cache_creation_input_tokens": created, "cache_read_input_tokens": cached,
	}
}

func (a *answer) stopReason() string {
	if a.reason == "length" {
		return "max_tokens"
	}
	return "end_turn"
}
