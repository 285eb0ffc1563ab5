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

// scored is an API that compares texts: /rerank (one query, many documents) and
// /score (as many on both sides, or one on the first). Each pair is a prompt.
type scored struct{ pooled }

// field reads vLLM's four names for each side (entrypoints/pooling/scoring/
// protocol.py), which include SGLang's.
func (scored) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "query", "queries", "text_1", "data_1":
		p.main = v
	case "documents", "items", "text_2", "data_2":
		p.other = v
	}
}

// prompt takes the first side alone for the text: all pairs begin with it, or with one of its texts.
func (scored) prompt(p *parse) {
	if !p.main.HasContent(p.body) || !p.other.HasContent(p.body) {
		return
	}
	b, first, pairs := p.body, p.main, int64(1)
	if first.First(b) == '{' { // {"text"} or {"content":[parts]}
		text := first.Get(b, "text")
		if first = first.Get(b, "content"); !first.HasContent(b) {
			first = text
		}
	}
	if p.main.First(b) != '[' && p.other.First(b) == '[' {
		pairs = 0
		for range p.other.Elements(b) {
			pairs++
		}
	}
	t := p.text(first.Len())
	t.content(first)
	p.shown(&t)
	p.req.Kind, p.req.Bytes = Text, t.h.written()*pairs+int64(p.other.Len())
}
