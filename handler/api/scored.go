package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

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
