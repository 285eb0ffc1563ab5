package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// generate is SGLang's /generate. vLLM's first server had one, too, with the
// prompt in a member of that name.
type generate struct{ base }

func (generate) Name() string   { return NameGenerate }
func (generate) traits() traits { return traits{shape: shapeSGLang} }

func (generate) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "text", "prompt":
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "image_data", "video_data", "audio_data": // neither ids nor text show them
		p.opaque = p.opaque || v.HasContent(p.body)
	case "sampling_params":
		p.sampling(v)
	case "return_logprob":
		p.logprobs = isTrue(v.Of(p.body))
	case "logprob_start_len":
		n, ok := integer(firstOf(p.body, v).Of(p.body))
		p.fromStart = ok && n >= 0 && n < int64(p.opt.BlockSize)
	}
}

func (generate) prompt(p *parse) {
	// SGLang computes everything from logprob_start_len on.
	p.req.SkipsCache = p.req.SkipsCache || p.logprobs && p.fromStart
	if !p.idsGiven() {
		p.input(p.main)
	}
}

// sampling reads sampling_params. A list has one object for each prompt: the first
// counts.
func (p *parse) sampling(v rawjson.Span) {
	b := p.body
	v = firstOf(b, v)
	if v.First(b) != '{' {
		return
	}
	c := rawjson.Enter(b, v.Start)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		switch string(key) {
		case "n":
			p.choices(v, true)
		case "prompt_logprobs":
			p.req.SkipsCache = p.req.SkipsCache || !v.IsNull(b)
		case "max_new_tokens", "max_tokens":
			p.limit(&p.req.MaxTokens, v)
		}
	}
}

// firstOf returns the first element of a list, or the value itself if it is none.
func firstOf(b []byte, v rawjson.Span) rawjson.Span {
	for first := range v.Elements(b) {
		return first
	}
	return v
}

// grownText is what is kept of a text that each event repeats from its
// beginning.
type grownText struct {
	size   int // of the last event's, in bytes
	tokens int64
	n      int // bytes in head
	head   [32]byte
}

// event reads one output, or the list of them in a plain answer to a batch.
func (g generate) event(a *Answer, b []byte, i int) bool {
	if b[i] == '{' {
		return g.output(a, b, i, true) >= 0
	}
	c := rawjson.Enter(b, i)
	for n := 0; c.Next(); n++ {
		if b[c.At] != '{' {
			c.Value()
			continue
		}
		// All outputs of a prompt repeat its length.
		c.At = g.output(a, b, c.At, n%a.req.answers == 0)
		if c.At < 0 {
			return false
		}
	}
	return c.Err == nil
}

// metaInfo is where the parts of a meta_info are.
type metaInfo struct {
	prompt, completion, cached, finish rawjson.Span
}

// output reads the object at b[i] and returns the index behind it, or -1 if it
// is malformed. With prompt, its counts of prompt tokens are added up.
func (g generate) output(a *Answer, b []byte, i int, prompt bool) int {
	var txt, ids, meta, object, fail rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("text", &txt), rawjson.To("output_ids", &ids), rawjson.To("meta_info", &meta),
		rawjson.To("object", &object), rawjson.To("error", &fail))
	if end < 0 {
		return -1
	}
	a.fault(b, fail, object)
	var m metaInfo
	meta.Read(b, rawjson.To("prompt_tokens", &m.prompt), rawjson.To("completion_tokens", &m.completion),
		rawjson.To("cached_tokens", &m.cached), rawjson.To("finish_reason", &m.finish))
	if m.finish.First(b) == '{' {
		m.finish = m.finish.Get(b, "type")
	}
	g.outputUsage(a, b, m, prompt)
	g.outputText(a, b, txt, ids, m)
	return end
}

// outputUsage reads the counts of one output. In a plain answer to a batch they
// add up; a stream mixes the outputs, and their sum stays unknown.
func (generate) outputUsage(a *Answer, b []byte, m metaInfo, prompt bool) {
	if a.req.Answers() == 1 {
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

// outputText reads an output's text. Each event of a stream repeats the text from
// its beginning, so only the last one's is hashed. With an option, the engine
// sends pieces instead: their text begins otherwise, and ends the prediction.
func (generate) outputText(a *Answer, b []byte, txt, ids rawjson.Span, m metaInfo) {
	raw, ok := txt.Str(b)
	g := &a.grown
	tokens := int64(unknown)
	count(&tokens, b, m.completion)
	ends := m.finish.HasContent(b)
	a.ids.grow(b, ids, tokens, !a.stream || ends)
	switch {
	case !ok: // vLLM's list of texts, each with its prompt
		a.predictable = false
		a.bearing = a.bearing || txt.HasContent(b) || ids.HasContent(b)
	case a.req.Answers() > 1: // mixed
		a.bearing = a.bearing || len(raw) > 0
	case tokens < 0:
		a.bearing = a.bearing || len(raw) > g.size
	default:
		a.bearing = a.bearing || tokens > g.tokens
	}
	a.finishReason(b, m.finish)
	a.done = a.done || txt.First(b) == '[' && !a.stream
	if a.predictable && g.n == 0 {
		g.n = copy(g.head[:], raw)
	}
	a.predictable = a.predictable && len(raw) >= g.size && bytes.HasPrefix(raw, g.head[:g.n])
	g.tokens, g.size = tokens, len(raw)
	if a.predictable && ends {
		a.hash.addString(raw)
		a.bound()
	}
}
