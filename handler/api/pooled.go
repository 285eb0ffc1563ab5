package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// pooled is an API without a decode phase: /v1/embeddings, and vLLM's and
// SGLang's /classify and /pooling. Its input is text or token ids, one or many,
// or a list of messages.
type pooled struct {
	base
	name string
}

func (a pooled) Name() string { return a.name }
func (pooled) Work() Work     { return Prefill }

func (pooled) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "input", "text": // SGLang's /classify has text
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "messages":
		p.other = v
	}
}

func (pooled) prompt(p *parse) {
	switch {
	case p.idsGiven():
	case p.main.HasContent(p.body):
		p.input(p.main)
	default:
		p.chat(p.other)
	}
}

func (pooled) event(a *Answer, b []byte, i int) bool {
	if b[i] == '[' { // SGLang's, to a batch
		a.bearing, a.done = true, true
		return true
	}
	var results, usage, fail, object rawjson.Span
	end := rawjson.ReadAt(b, i,
		rawjson.To("data", &results), rawjson.To("results", &results), rawjson.To("scores", &results),
		rawjson.To("embedding", &results), rawjson.To("usage", &usage), rawjson.To("meta_info", &usage),
		rawjson.To("error", &fail), rawjson.To("object", &object))
	if results.First(b) == '[' {
		a.bearing, a.done = true, true
	}
	a.usage(b, usage)
	a.fault(b, i, fail, object)
	return end >= 0
}
