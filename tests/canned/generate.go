package canned

import (
	"maps"
	"strings"
)

// output returns SGLang's output after n pieces.
func (p *Answer) output(n int) map[string]any {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = 100 + uint32(i)
	}
	if p.Engine != nil {
		ids = p.Engine.IDs[:n]
	}
	var finish any
	switch {
	case n < len(p.Pieces):
	case p.Engine != nil && p.Reason == "stop":
		finish = map[string]any{"type": "stop", "matched": ids[n-1]}
	default:
		finish = map[string]any{"type": "length", "length": n}
	}
	return map[string]any{
		"text": strings.Join(p.Pieces[:n], ""), "output_ids": ids,
		"meta_info": map[string]any{
			"id": p.ID, "finish_reason": finish, "prompt_tokens": p.Prompt, "completion_tokens": n, "cached_tokens": p.Cached,
		},
	}
}

func generateWhole(p *Answer) any { return p.output(len(p.Pieces)) }

// generateEvents repeat the text from its beginning, as SGLang's do.
func generateEvents(p *Answer) []Event {
	out := make([]Event, len(p.Pieces))
	for i := range out {
		out[i] = Event{Doc: p.output(i + 1), Word: true}
	}
	return out
}

// tokensOf returns an answer of vLLM's /inference/v1/generate with some of the tokens.
func (p *Answer) tokensOf(from, to int) map[string]any {
	c := map[string]any{"index": 0, "token_ids": p.Engine.IDs[from:to], "logprobs": nil, "finish_reason": nil}
	if to == len(p.Pieces) {
		c["finish_reason"] = p.Reason
	}
	return map[string]any{"request_id": p.ID, "choices": []any{c}}
}

func tokensWhole(p *Answer) any {
	doc := p.tokensOf(0, len(p.Pieces))
	doc["model"], doc["created"], doc["usage"] = p.Model, p.Begun, p.usageDoc(false, p.Completion)
	maps.Copy(doc, p.Engine.InWhole)
	return doc
}

func tokensEvents(p *Answer) (out []Event) {
	for i := range p.Pieces {
		out = append(out, Event{Doc: p.tokensOf(i, i+1), Word: true})
	}
	if p.Usage {
		out = append(out, Event{Doc: map[string]any{"request_id": p.ID, "choices": []any{}, "usage": p.usageDoc(false, p.Completion)}})
	}
	return out
}
