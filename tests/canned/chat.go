package canned

import (
	"encoding/json"
	"maps"
)

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

var null = json.RawMessage("null")

// ids returns token ids as JSON, or null if they were not asked for.
func (p *Answer) ids(tokens []uint32) json.RawMessage {
	if !p.Engine.ReturnIDs {
		return null
	}
	ids, _ := json.Marshal(append([]uint32{}, tokens...)) // [] and not null if there are none
	return ids
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

// message is a chat's answer, or what a chunk adds to it.
type message struct {
	Role      string  `json:"role,omitempty"`
	Content   *string `json:"content"`
	Reasoning string  `json:"reasoning_content,omitempty"`
	ToolCalls []any   `json:"tool_calls,omitempty"`
}

// spoken returns pieces of a chat's answer, from one on.
func (p *Answer) spoken(from int, pieces ...string) *message {
	var m message
	var content string
	for i, piece := range pieces {
		if from+i < p.Reasoning {
			m.Reasoning += piece
		} else {
			content += piece
		}
	}
	m.Content = &content
	return &m
}

// wholeOf returns a whole answer of chat or completions. Its choice has a value of some name.
func (p *Answer) wholeOf(chat bool, object, name string, value any) map[string]any {
	c := map[string]any{"index": 0, name: value, "logprobs": nil, "finish_reason": p.Reason}
	doc := map[string]any{"id": p.ID, "object": object, "created": p.Begun, "model": p.Model, "choices": []any{c}}
	if e := p.Engine; e != nil {
		within := c
		if c["stop_reason"], c["token_ids"] = nil, p.ids(e.IDs); chat {
			within = doc
		}
		within["prompt_token_ids"] = p.ids(e.PromptIDs)
		maps.Copy(c, e.InChoice)
		maps.Copy(doc, e.InWhole)
		if e.Timings != nil {
			doc["timings"] = e.Timings
		}
	}
	doc["usage"] = p.usageDoc(chat, p.Completion)
	return doc
}

func chatWhole(p *Answer) any {
	m := p.spoken(0, p.Pieces...)
	if m.Role = "assistant"; p.Tool != "" {
		m.Content, m.ToolCalls = nil, []any{p.toolCall(toolArguments)}
	}
	return p.wholeOf(true, "chat.completion", "message", m)
}

// chatEvents are the role, the words or the tool call one by one, the reason of
// the end, and the usage if asked for.
func chatEvents(p *Answer) []Event {
	s := &chunks{p: p, object: "chat.completion.chunk", chat: true}
	role := p.spoken(0)
	role.Role = "assistant"
	if s.add(role, nil, false); p.Engine != nil {
		s.last.PromptTokenIDs = p.ids(p.Engine.PromptIDs)
	}
	for i, piece := range p.Pieces {
		s.add(p.spoken(i, piece), nil, true)
	}
	if p.Tool != "" {
		first := p.toolCall("")
		first["index"] = 0
		s.add(map[string]any{"tool_calls": []any{first}}, nil, true)
		for _, piece := range toolPieces {
			s.add(map[string]any{"tool_calls": []any{map[string]any{"index": 0, "function": map[string]any{"arguments": piece}}}}, nil, true)
		}
	}
	return s.end(map[string]any{}, nil)
}

func textWhole(p *Answer) any {
	return p.wholeOf(false, "text_completion", "text", p.text())
}

func textEvents(p *Answer) []Event {
	s := &chunks{p: p, object: "text_completion"}
	for i := range p.Pieces {
		if s.add(nil, &p.Pieces[i], true); p.Engine != nil {
			s.last.Choices[0].PromptTokenIDs = null
			if i == 0 {
				s.last.Choices[0].PromptTokenIDs = p.ids(p.Engine.PromptIDs)
			}
		}
	}
	return s.end(nil, new(string))
}

// chunk is an event of a streamed chat or completion. Members that only simulated engines have are nil
// for others. A stream has one for each token, so it is no map.
type chunk struct {
	ID             string          `json:"id"`
	Object         string          `json:"object"`
	Created        int64           `json:"created"`
	Model          string          `json:"model"`
	Choices        []chunkChoice   `json:"choices"`
	Usage          map[string]any  `json:"usage,omitempty"`
	PromptTokenIDs json.RawMessage `json:"prompt_token_ids,omitempty"`
	Timings        any             `json:"timings,omitempty"`
}

type chunkChoice struct {
	Index          int             `json:"index"`
	Delta          any             `json:"delta,omitempty"` // of a chat
	Text           *string         `json:"text,omitempty"`  // of a completion
	Logprobs       *string         `json:"logprobs"`
	FinishReason   *string         `json:"finish_reason"`
	StopReason     json.RawMessage `json:"stop_reason,omitempty"`
	TokenIDs       json.RawMessage `json:"token_ids,omitempty"`
	PromptTokenIDs json.RawMessage `json:"prompt_token_ids,omitempty"`
}

// chunks is a stream of chat or completions.
type chunks struct {
	p      *Answer
	object string
	chat   bool
	events []Event
	words  int
	last   *chunk
}

// add adds a chunk with one choice.
func (s *chunks) add(delta any, text *string, word bool) {
	p, c := s.p, chunkChoice{Delta: delta, Text: text}
	if e := p.Engine; e != nil {
		var ids []uint32
		if word {
			ids = e.IDs[s.words : s.words+1]
		}
		c.StopReason, c.TokenIDs = null, p.ids(ids)
	}
	if word {
		s.words++
	}
	s.push([]chunkChoice{c}, word)
}

func (s *chunks) push(choices []chunkChoice, word bool) {
	s.last = &chunk{ID: s.p.ID, Object: s.object, Created: s.p.Begun, Model: s.p.Model, Choices: choices}
	s.events = append(s.events, Event{Doc: s.last, Word: word})
}

// end adds the reason of the end, and the chunk with the usage if it was asked for. A simulated engine
// has the reason in the chunk of the last token, as vLLM does, others in one of its own.
func (s *chunks) end(delta any, text *string) []Event {
	if e := s.p.Engine; e == nil {
		s.add(delta, text, false)
	} else {
		s.last.Timings = e.Timings
	}
	s.last.Choices[0].FinishReason = &s.p.Reason
	if s.p.Usage {
		s.push([]chunkChoice{}, false)
		s.last.Usage = s.p.usageDoc(s.chat, s.p.Completion)
	}
	return s.events
}
