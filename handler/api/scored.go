package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// scored is an API that compares texts: /rerank (one query, many documents) and
// /score (as many on both sides, or one on the first). Each pair is a prompt that
// begins with the first text, which is what the prompts have in common.
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

func (scored) prompt(p *parse) {
	b, r := p.body, p.req
	if !p.main.HasContent(b) || !p.other.HasContent(b) {
		return
	}
	if p.main.First(b) == '[' && b[rawjson.SkipSpace(b, p.main.Start+1)]-'0' <= 9 {
		return // SGLang's query of token ids: rare, and placed by load
	}
	t := p.text(p.main.Len() + p.other.Len())
	n1, size1 := t.passages(p.main)
	t.h.addByte(markSep)
	n2, size2 := t.passages(p.other)
	if n1 == 1 {
		size1 *= int64(n2)
	}
	r.Kind, r.Bytes, r.prompts = Text, size1+size2, max(n1, n2)
	p.shown(&t)
}

// passages writes the first of one side's texts. It returns their number and
// their total length in bytes.
func (t *conversation) passages(v rawjson.Span) (n int, size int64) {
	before := t.h.written()
	if v.First(t.b) != '[' {
		t.passage(v)
		return 1, t.h.written() - before
	}
	for v := range v.Elements(t.b) {
		if n == 0 {
			t.passage(v)
			size = t.h.written() - before
		} else if raw, ok := v.Str(t.b); ok {
			size += textLen(raw)
		} else {
			size += int64(v.Len())
		}
		n++
	}
	return n, size
}

// passage writes a text: a string, {"text"}, or {"content":[parts]}.
func (t *conversation) passage(v rawjson.Span) {
	if v.First(t.b) == '{' {
		text := v.Get(t.b, "text")
		if v = v.Get(t.b, "content"); !v.HasContent(t.b) {
			v = text
		}
	}
	t.content(v)
}
