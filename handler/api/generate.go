package api

import "bytes"

// generate is SGLang's own /generate. vLLM's first server had one, too, with
// the prompt in a member of that name.
type generate struct{}

func (generate) Name() string { return "generate" }
func (generate) Work() Work   { return Generate }
func (generate) shape() shape { return shapeSGLang }

func (generate) field(p *parse, key []byte, v span) {
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
		p.returnLogprob = isTrue(v.of(p.body))
	case "logprob_start_len":
		p.logprobStart = p.start(v)
	}
}

func (generate) prompt(p *parse) {
	b := p.body
	if hasMembers(b, p.ids) {
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
func (p *parse) sampling(v span) {
	b := p.body
	if v.first(b) == '[' {
		c := enter(b, v.start, 0)
		if !c.next() {
			return
		}
		v = c.value()
	}
	if v.first(b) != '{' {
		return
	}
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "n":
			p.choices(v, true)
		case "prompt_logprobs":
			p.req.SkipsCache = p.req.SkipsCache || !isNull(v.of(b))
		case "max_new_tokens", "max_tokens":
			if n, ok := integer(v.of(b)); ok && n > 0 {
				p.req.MaxTokens = n
			}
		}
	}
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

func (p *parse) listed(t *conversation, class mediaClass, v span, depth int) (n int) {
	b := p.body
	switch v.first(b) {
	case '[':
		c := enter(b, v.start, 0)
		for c.next() {
			if v := c.value(); depth < 2 {
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
	if raw, ok := v.str(b); ok {
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

func (tokensIn) field(p *parse, key []byte, v span) {
	switch string(key) {
	case "token_ids":
		p.ids = v
	case "features": // of images, whose places in the ids look alike
		p.unlike = p.unlike || hasMembers(p.body, v)
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
	c := enter(b, i, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "token_ids":
			a.bearing = a.bearing || hasMembers(b, v)
			a.ids.add(b, v)
		case "finish_reason":
			a.finishReason(b, v)
		}
	}
	if c.err != nil {
		return -1
	}
	return c.i
}
