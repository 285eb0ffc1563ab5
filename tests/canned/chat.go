package canned

import "maps"

// usageDoc is the usage of chat and completions after a number of tokens. Only simulated engines
// report what was cached, and for chats what is now.
func (p *Answer) usageDoc(chat bool, tokens int) map[string]any {
	u := map[string]any{"prompt_tokens": p.Prompt, "completion_tokens": tokens, "total_tokens": p.Prompt + tokens}
	if p.Engine != nil {
		details := map[string]any{"cached_tokens": p.Cached, "created_cache_tokens": nil, "multimodal_tokens": nil}
		if chat {
			details["created_cache_tokens"] = p.Created
		}
		u["prompt_tokens_details"] = details
	}
	return u
}

// choices wraps choices in what stands around them.
func (p *Answer) choices(object string, choices ...any) map[string]any {
	if choices == nil {
		choices = []any{}
	}
	return map[string]any{"id": p.ID, "object": object, "created": p.Begun, "model": p.Model, "choices": choices}
}

// choice returns one choice with a member of the given name; reason is that of
// its end, nil while it goes on. ids are those of its tokens.
func (p *Answer) choice(name string, value, reason any, ids ...uint32) map[string]any {
	c := map[string]any{"index": 0, name: value, "logprobs": nil, "finish_reason": reason}
	if p.Engine != nil {
		c["stop_reason"], c["token_ids"] = nil, p.ids(ids)
	}
	return c
}

// ids returns token ids, or null if they were not asked for.
func (p *Answer) ids(tokens []uint32) any {
	if !p.Engine.ReturnIDs {
		return nil
	}
	return append([]uint32{}, tokens...) // [] and not null if there are none
}

func chatCalled(c *call) bool {
	n := len(c.Messages)
	return n == 0 || c.Messages[n-1].Role == "tool"
}

func (p *Answer) toolCall(arguments string) map[string]any {
	return map[string]any{
		"id": "call_" + p.ID, "type": "function",
		"function": map[string]any{"name": p.Tool, "arguments": arguments},
	}
}

// spoken returns pieces of a chat's answer, from one on.
func (p *Answer) spoken(from int, pieces ...string) map[string]any {
	text := map[bool]string{}
	for i, piece := range pieces {
		text[from+i < p.Reasoning] += piece
	}
	s := map[string]any{"content": text[false]}
	if text[true] != "" {
		s["reasoning_content"] = text[true]
	}
	return s
}

// wholeOf returns a whole answer of chat or completions.
func (p *Answer) wholeOf(chat bool, object string, c map[string]any) map[string]any {
	doc := p.choices(object, c)
	if e := p.Engine; e != nil {
		within := c
		if c["token_ids"] = p.ids(e.IDs); chat {
			within = doc
		}
		within["prompt_token_ids"] = p.ids(e.PromptIDs)
		maps.Copy(c, e.InChoice)
		maps.Copy(doc, e.InWhole)
		maps.Copy(doc, e.AtEnd)
	}
	doc["usage"] = p.usageDoc(chat, p.Completion)
	return doc
}

func chatWhole(p *Answer) any {
	message := p.spoken(0, p.Pieces...)
	if message["role"] = "assistant"; p.Tool != "" {
		message["content"], message["tool_calls"] = nil, []any{p.toolCall(toolArguments)}
	}
	return p.wholeOf(true, "chat.completion", p.choice("message", message, p.Reason))
}

// chatEvents are the role, the words or the tool call one by one, the reason of
// the end, and the usage if asked for.
func chatEvents(p *Answer) []Event {
	s := &chunks{p: p, object: "chat.completion.chunk", name: "delta"}
	role := s.add(map[string]any{"role": "assistant", "content": ""}, false)
	if p.Engine != nil {
		role["prompt_token_ids"] = p.ids(p.Engine.PromptIDs)
	}
	for i, piece := range p.Pieces {
		s.add(p.spoken(i, piece), true)
	}
	if p.Tool != "" {
		first := p.toolCall("")
		first["index"] = 0
		s.add(map[string]any{"tool_calls": []any{first}}, true)
		for _, piece := range toolPieces {
			s.add(map[string]any{"tool_calls": []any{map[string]any{"index": 0, "function": map[string]any{"arguments": piece}}}}, true)
		}
	}
	return s.end(map[string]any{})
}

func textWhole(p *Answer) any {
	return p.wholeOf(false, "text_completion", p.choice("text", p.text(), p.Reason))
}

func textEvents(p *Answer) []Event {
	s := &chunks{p: p, object: "text_completion", name: "text"}
	for i, piece := range p.Pieces {
		if s.add(piece, true); p.Engine != nil {
			s.last["prompt_token_ids"] = nil
			if i == 0 {
				s.last["prompt_token_ids"] = p.ids(p.Engine.PromptIDs)
			}
		}
	}
	return s.end("")
}

// chunks is a stream of chat or completions.
type chunks struct {
	p            *Answer
	object, name string
	events       []Event
	words        int
	last         map[string]any // choice
}

// add adds a chunk with one choice, and returns it.
func (s *chunks) add(value any, word bool) map[string]any {
	var ids []uint32
	if word {
		if s.p.Engine != nil {
			ids = s.p.Engine.IDs[s.words : s.words+1]
		}
		s.words++
	}
	s.last = s.p.choice(s.name, value, nil, ids...)
	doc := s.p.choices(s.object, s.last)
	if s.p.Usage && s.p.EachUsage {
		doc["usage"] = s.p.usageDoc(s.name == "delta", s.words)
	}
	s.events = append(s.events, Event{Doc: doc, Word: word})
	return doc
}

// end adds the reason of the end, and the chunk with the usage if it was asked for. A simulated engine
// has the reason in the chunk of the last token, as vLLM does, others in one of its own.
func (s *chunks) end(nothing any) []Event {
	if s.p.Engine == nil {
		s.add(nothing, false)
	} else {
		maps.Copy(s.events[len(s.events)-1].Doc.(map[string]any), s.p.Engine.AtEnd)
	}
	s.last["finish_reason"] = s.p.Reason
	if s.p.Usage {
		doc := s.p.choices(s.object)
		doc["usage"] = s.p.usageDoc(s.name == "delta", s.p.Completion)
		s.events = append(s.events, Event{Doc: doc})
	}
	return s.events
}
