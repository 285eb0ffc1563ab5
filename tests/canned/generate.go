package canned

import "strings"

// output returns SGLang's output after n words.
func (p *reply) output(n int) map[string]any {
	var finish any
	if n == len(p.words) {
		finish = map[string]any{"type": "length", "length": n}
	}
	ids := make([]int, n)
	for i := range ids {
		ids[i] = 100 + i
	}
	return map[string]any{
		"text": strings.Join(p.words[:n], " "), "output_ids": ids,
		"meta_info": map[string]any{
			"id": p.id, "finish_reason": finish, "prompt_tokens": p.prompt, "completion_tokens": n, "cached_tokens": p.cached,
		},
	}
}

func generateWhole(p *reply, _ *call) any { return p.output(len(p.words)) }

// generateEvents repeat the text from its beginning, as SGLang's do.
func generateEvents(p *reply, _ *call) []event {
	out := make([]event, len(p.words))
	for i := range out {
		out[i] = event{doc: p.output(i + 1), word: true}
	}
	return out
}
