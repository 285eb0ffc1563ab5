package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// scored is an API that compares texts: /rerank (one query, many documents)
// and /score (as many on both sides, or one on the first). Each pair is a
// prompt of its own, which begins with the first text, so that it is what they
// have in common.
type scored struct{ name string }

func (a scored) Name() string { return a.name }
func (scored) Work() Work     { return Prefill }
func (scored) shape() shape   { return shapeOpenAI }

// field knows vLLM's four names for each side (entrypoints/pooling/scoring/
// protocol.py) and SGLang's, which are among them.
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
	if p.main.First(b) == '[' && b[rawjson.SkipSpace(b, p.main.Start+1)]-'0' <= 9 {
		p.scoredTokens()
		return
	}
	if !p.main.HasContent(b) || !p.other.HasContent(b) {
		return
	}
	p.begin(p.main.End - p.main.Start + p.other.End - p.other.Start)
	t := conversation{h: &p.hash, b: b, seed: p.opt.Seed}
	n1, size1 := t.passages(p.main)
	t.h.AddByte(markSep)
	n2, size2 := t.passages(p.other)
	if n1 == 1 {
		size1 *= int64(n2)
	}
	r.Kind, r.Bytes, r.prompts = Text, size1+size2, max(n1, n2)
	r.Media, r.MediaTokens, r.MediaEnd = t.media, t.mediaTokens, t.mediaEnd
}

// passages writes the first of one side's texts, and returns how many there
// are and their length in bytes.
func (t *conversation) passages(v rawjson.Span) (n int, size int64) {
	if v.First(t.b) != '[' {
		before := t.h.Bytes()
		t.passage(v)
		return 1, t.h.Bytes() - before
	}
	for v := range v.Elements(t.b) {
		if n == 0 {
			before := t.h.Bytes()
			t.passage(v)
			size = t.h.Bytes() - before
		} else if raw, ok := v.Str(t.b); ok {
			size += textLen(raw)
		} else {
			size += int64(v.End - v.Start)
		}
		n++
	}
	return n, size
}

// passage writes a text: a string, {"text"}, or {"content":[parts]}.
func (t *conversation) passage(v rawjson.Span) {
	if v.First(t.b) != '{' {
		t.content(v)
		return
	}
	if content := v.Get(t.b, "content"); content.HasContent(t.b) {
		t.content(content)
		return
	}
	t.content(v.Get(t.b, "text"))
}

// scoredTokens reads SGLang's form of a query and items that are token ids.
// The query alone is the chain.
func (p *parse) scoredTokens() {
	r, b := p.req, p.body
	n, ok := p.tokens(p.main, true)
	if !ok || p.other.First(b) != '[' {
		r.Blocks = nil
		return
	}
	sum := int64(0)
	items := 0
	for v := range p.other.Elements(b) {
		if v.First(b) == '[' {
			if k, ok := p.tokens(v, false); ok {
				sum += k
			}
		}
		items++
	}
	r.Kind, r.prompts = Tokens, max(items, 1)
	r.Tokens = n*int64(max(items, 1)) + sum
}

func (scored) begin(*Answer) {}

func (scored) event(a *Answer, b []byte, i int) bool { return a.result(b, i) }
