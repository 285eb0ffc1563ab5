package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// completions is /v1/completions. Its prompt is plain text or token ids; the
// answer continues it directly.
type completions struct{ base }

func (completions) Name() string { return NameCompletions }
func (completions) traits() traits {
	return traits{asksUsage: true, object: "text_completion", chunk: "text_completion"}
}

func (completions) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "prompt":
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	}
}

func (completions) prompt(p *parse) {
	if !p.idsGiven() {
		p.input(p.main)
	}
}

func (completions) event(a *Answer, b []byte, i int) bool { return a.chunk(b, i, completionChoice) }

// completionChoice is a [choice].
func completionChoice(a *Answer, b []byte, i int) int {
	var index, txt, finish rawjson.Span
	end := rawjson.ReadAt(b, i,
		rawjson.To("index", &index), rawjson.To("text", &txt), rawjson.To("finish_reason", &finish))
	if end < 0 {
		return -1
	}
	a.firstChoice(b, index)
	if raw, ok := txt.Str(b); ok {
		a.text(raw)
	}
	a.finishReason(b, finish)
	return end
}
