package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

func (generate) begin(*Answer) {}

// grownText is what is kept of a text that each event repeats from its
// beginning.
type grownText struct {
	size   int // of the last event's, in bytes
	tokens int64
	n      int // bytes in head
	head   [32]byte
}

// event reads one output, or in a plain answer to a batch a list of them.
func (generate) event(a *Answer, b []byte, i int) bool {
	if b[i] == '{' {
		return a.output(b, i, true) >= 0
	}
	c := rawjson.Enter(b, i)
	for n := 0; c.Next(); n++ {
		if b[c.At] != '{' {
			c.Value()
			continue
		}
		// the outputs to one prompt all say its length
		c.At = a.output(b, c.At, n%a.req.answers == 0)
		if c.At < 0 {
			return false
		}
	}
	return c.Err == nil
}

// output reads the object at b[i] and returns the index behind it, or -1 if it
// is malformed. With prompt it is the one whose prompt counts.
func (a *Answer) output(b []byte, i int, prompt bool) int {
	var txt, ids, meta, object, fail rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("text", &txt), rawjson.To("output_ids", &ids), rawjson.To("meta_info", &meta),
		rawjson.To("object", &object), rawjson.To("error", &fail))
	if end < 0 {
		return -1
	}
	a.fault(b, fail)
	a.object(b, object)
	m := readMeta(b, meta)
	a.generateUsage(b, m, prompt)
	a.outputText(b, txt, ids, m)
	return end
}

// metaInfo is where the parts of a meta_info are.
type metaInfo struct {
	prompt, completion, cached, finish rawjson.Span
}

func readMeta(b []byte, v rawjson.Span) (m metaInfo) {
	v.Read(b, rawjson.To("prompt_tokens", &m.prompt), rawjson.To("completion_tokens", &m.completion),
		rawjson.To("cached_tokens", &m.cached), rawjson.To("finish_reason", &m.finish))
	if m.finish.First(b) == '{' {
		m.finish = m.finish.Get(b, "type")
	}
	return m
}

// generateUsage takes the counts of one output. Those of a plain answer to a
// batch add up; in a stream its outputs come mixed, and their sum is not said.
func (a *Answer) generateUsage(b []byte, m metaInfo, prompt bool) {
	if a.req.prompts*a.req.answers == 1 {
		count(&a.prompt, b, m.prompt)
		count(&a.completion, b, m.completion)
		count(&a.cached, b, m.cached)
		return
	}
	if a.stream {
		return
	}
	add(&a.completion, b, m.completion)
	if prompt {
		add(&a.prompt, b, m.prompt)
		add(&a.cached, b, m.cached)
	}
}

func add(to *int64, b []byte, v rawjson.Span) {
	n := int64(unknown)
	if count(&n, b, v); n >= 0 {
		*to = max(*to, 0) + n
	}
}

// outputText takes an output's text. Each event of a stream repeats it from
// its beginning, so the last one's is all of it; a text that does not begin as
// the first one did comes in pieces (an option of the engine), and is not put
// together.
func (a *Answer) outputText(b []byte, txt, ids rawjson.Span, m metaInfo) {
	raw, ok := txt.Str(b)
	g := &a.grown
	tokens := int64(unknown)
	count(&tokens, b, m.completion)
	if ids.End > 0 {
		a.ids.grow(b, ids, tokens, !a.stream || m.finish.HasContent(b))
	}
	switch {
	case !ok: // vLLM's list of texts, each with its prompt
		a.steady = false
		a.bearing = a.bearing || txt.HasContent(b) || ids.HasContent(b)
	case a.req.prompts*a.req.answers > 1: // the outputs come mixed
		a.bearing = a.bearing || len(raw) > 0
	case tokens < 0:
		a.bearing = a.bearing || len(raw) > g.size
	default:
		a.bearing = a.bearing || tokens > g.tokens
	}
	a.finishReason(b, m.finish)
	if txt.First(b) == '[' && !a.stream {
		a.done = true
	}
	if !a.steady {
		g.tokens, g.size = tokens, len(raw)
		return
	}
	if g.n == 0 {
		g.n = copy(g.head[:], raw)
	}
	if len(raw) < g.size || !bytes.HasPrefix(raw, g.head[:g.n]) {
		a.steady = false
		return
	}
	g.tokens, g.size = tokens, len(raw)
	if m.finish.HasContent(b) {
		a.hash.AddString(raw)
		a.bound()
	}
}
