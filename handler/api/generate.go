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
	for key, v := range firstOf(b, v).Members(b) {
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

func firstOf(b []byte, v rawjson.Span) rawjson.Span {
	for first := range v.Elements(b) {
		return first
	}
	return v
}

// event reads one output, or the list of them in a plain answer to a batch.
func (generate) event(a *Answer, b []byte, i int) bool {
	if b[i] == '{' {
		return a.output(b, i) >= 0
	}
	return a.each(b, i, a.output) >= 0
}

func (a *Answer) output(b []byte, i int) int {
	var txt, ids, meta, object, fail, prompt, completion, cached, finish rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("text", &txt), rawjson.To("output_ids", &ids), rawjson.To("meta_info", &meta),
		rawjson.To("object", &object), rawjson.To("error", &fail))
	if end < 0 {
		return -1
	}
	a.fault(b, i, fail, object)
	meta.Read(b, rawjson.To("prompt_tokens", &prompt), rawjson.To("completion_tokens", &completion),
		rawjson.To("cached_tokens", &cached), rawjson.To("finish_reason", &finish))
	if finish.First(b) == '{' {
		if n := statusNumber(finish.Get(b, "status_code").Of(b)); n > 0 { // of an abort that nobody asked for
			e := errorCause{number: n}
			e.read(b, finish.Get(b, "message"), 0)
			a.blame(e.status())
		}
		finish = finish.Get(b, "type")
	}
	if a.req.Answers() == 1 { // those of several are not added up
		count(&a.prompt, b, prompt)
		count(&a.completion, b, completion)
		count(&a.cached, b, cached)
	}
	ends := finish.HasContent(b)
	a.ids.grow(b, ids, a.completion, !a.stream || ends)
	a.bearing = a.bearing || txt.HasContent(b) || ids.HasContent(b)
	a.finishReason(b, finish)
	a.done = a.done || txt.First(b) == '[' && !a.stream
	a.grownText(b, txt, ends)
	return end
}

// grownText reads a text that each event of a stream repeats from its beginning: only the last
// one's is hashed. With an option, the engine sends pieces instead, which begin otherwise. That ends
// the prediction, as does vLLM's list of texts, each with its prompt.
func (a *Answer) grownText(b []byte, txt rawjson.Span, ends bool) {
	raw, ok := txt.Str(b)
	a.predictable = a.predictable && ok && len(raw) >= a.grown && bytes.HasPrefix(raw, a.begins[:min(a.grown, len(a.begins))])
	a.grown = len(raw)
	copy(a.begins[:], raw)
	if a.predictable && ends {
		a.hash.addString(raw)
		a.bound()
	}
}
