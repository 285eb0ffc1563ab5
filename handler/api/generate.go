package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// generate is SGLang's /generate. vLLM's first server had one, too, with the
// prompt in a member of that name.
type generate struct{ base }

func (generate) Name() string { return NameGenerate }

func (generate) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "text", "prompt":
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "image_data":
		p.media[0] = v
	case "video_data":
		p.media[1] = v
	case "audio_data":
		p.media[2] = v
	case "sampling_params":
		p.sampling(v)
	case "logprob_start_len": // SGLang computes everything from there on
		n, ok := integer(firstOf(p.body, v).Of(p.body))
		p.req.SkipsCache = p.req.SkipsCache || ok && n >= 0
	}
}

func (generate) prompt(p *parse) {
	if !p.idsGiven() {
		p.input(p.main)
	}
	if p.req.Kind == Tokens && p.beside(nil) > 0 {
		// The ids do not show which images take the places of their tokens.
		p.req.Kind, p.req.Blocks, p.req.Tokens = None, nil, 0
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
		return g.output(a, b, i) >= 0
	}
	return a.choices(b, i, g.output) >= 0
}

// output is a [choice]. The counts of several outputs stay unknown.
func (g generate) output(a *Answer, b []byte, i int) int {
	var txt, ids, meta, object, fail, prompt, completion, cached, finish rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("text", &txt), rawjson.To("output_ids", &ids), rawjson.To("meta_info", &meta),
		rawjson.To("object", &object), rawjson.To("error", &fail))
	if end < 0 {
		return -1
	}
	a.fault(b, fail, object)
	meta.Read(b, rawjson.To("prompt_tokens", &prompt), rawjson.To("completion_tokens", &completion),
		rawjson.To("cached_tokens", &cached), rawjson.To("finish_reason", &finish))
	if finish.First(b) == '{' {
		finish = finish.Get(b, "type")
	}
	tokens := int64(unknown)
	count(&tokens, b, completion)
	if a.req.Answers() == 1 {
		count(&a.prompt, b, prompt)
		count(&a.completion, b, completion)
		count(&a.cached, b, cached)
	}
	if raw, ok := txt.Str(b); ok {
		g.outputText(a, raw, tokens, finish.HasContent(b))
	} else { // vLLM's list of texts, each with its prompt
		a.predictable = false
		a.bearing = a.bearing || txt.HasContent(b) || ids.HasContent(b)
		a.done = a.done || txt.First(b) == '[' && !a.stream
	}
	a.finishReason(b, finish)
	return end
}

// outputText reads an output's text. Each event of a stream repeats the text from
// its beginning, so only the last one's is hashed. With an option, the engine
// sends pieces instead: their text begins otherwise, and ends the prediction.
func (generate) outputText(a *Answer, raw []byte, tokens int64, ends bool) {
	g := &a.grown
	switch {
	case a.req.Answers() > 1: // mixed
		a.bearing = a.bearing || len(raw) > 0
	case tokens < 0:
		a.bearing = a.bearing || len(raw) > g.size
	default:
		a.bearing = a.bearing || tokens > g.tokens
	}
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
