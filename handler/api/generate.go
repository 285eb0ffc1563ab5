package api

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// generate is SGLang's own /generate. vLLM's first server had one, too, with
// the prompt in a member of that name.
type generate struct{}

func (generate) Name() string { return "generate" }
func (generate) Work() Work   { return Generate }
func (generate) shape() shape { return shapeSGLang }

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
	case "return_logprob":
		p.returnLogprob = isTrue(v.Of(p.body))
	case "logprob_start_len":
		p.logprobStart = p.start(v)
	}
}

func (generate) prompt(p *parse) {
	b := p.body
	if p.ids.HasContent(b) {
		p.input(p.ids)
	} else {
		p.input(p.main)
	}
	if p.req.Kind == Tokens && p.beside(nil) > 0 {
		// what takes the places of images is not in the ids
		p.req.Kind, p.req.Blocks, p.req.Tokens = None, nil, 0
	}
}

// sampling reads sampling_params; of a list, which has one for each prompt,
// the first.
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
			if n, ok := integer(v.Of(b)); ok && n > 0 {
				p.req.MaxTokens = n
			}
		}
	}
}

// firstOf returns the first element of a list, the value itself if it is none.
func firstOf(b []byte, v rawjson.Span) rawjson.Span {
	for first := range v.Elements(b) {
		return first
	}
	return v
}

// beside reads the media that stand beside a prompt, each a string or a list
// of strings, and returns how many there are. With a conversation they are
// written before the text, whose places for them are in it.
func (p *parse) beside(t *conversation) (n int) {
	for i, v := range p.media {
		n += p.listed(t, mediaImage+mediaClass(i), v, 0)
	}
	return n
}

func (p *parse) listed(t *conversation, class mediaClass, v rawjson.Span, depth int) (n int) {
	b := p.body
	switch v.First(b) {
	case '[':
		for v := range v.Elements(b) {
			if depth < 2 {
				n += p.listed(t, class, v, depth+1)
			}
		}
		return n
	case '"', '{':
	default:
		return 0
	}
	if t == nil {
		return 1
	}
	m := medium{class: class}
	if raw, ok := v.Str(b); ok {
		m.set(raw, loose(raw))
	} else {
		m.read(b, v, []byte("data"))
	}
	t.write(&m, v)
	return 1
}

// loose tells what a string is that may be a URL or base64.
func loose(raw []byte) mediaForm {
	if i := bytes.IndexByte(raw[:min(len(raw), 16)], ':'); i > 0 {
		return mediaURL
	}
	return mediaData
}

// tokensIn is vLLM's /inference/v1/generate: ids in, ids out.
type tokensIn struct{}

func (tokensIn) Name() string { return "tokens" }
func (tokensIn) Work() Work   { return Generate }
func (tokensIn) shape() shape { return shapeOpenAI }

func (tokensIn) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "token_ids":
		p.ids = v
	case "features": // of images, whose places in the ids look alike
		p.unlike = p.unlike || v.HasContent(p.body)
	case "sampling_params":
		p.sampling(v)
	}
}

func (tokensIn) prompt(p *parse) { p.input(p.ids) }
func (tokensIn) begin(*Answer)   {}

func (tokensIn) event(a *Answer, b []byte, i int) bool {
	return a.chunk(b, i, tokensChoice)
}

func tokensChoice(a *Answer, b []byte, i int) int {
	var ids, finish rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("token_ids", &ids), rawjson.To("finish_reason", &finish))
	if end < 0 {
		return -1
	}
	a.bearing = a.bearing || ids.HasContent(b)
	a.ids.add(b, ids)
	a.finishReason(b, finish)
	return end
}
