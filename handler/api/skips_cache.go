package api

// skipsCache tells whether the request asks for log probabilities of the prompt's
// own tokens. vLLM then reuses nothing: with echo, prompt_logprobs is top_logprobs
// in chats, which is 0 by default, and logprobs in completions (protocol.py of each
// API). SGLang reuses nothing from logprob_start_len on.
func (p *parse) skipsCache() bool {
	switch p.req.API.(type) {
	case chat:
		return p.echo && !p.noTop
	case completions:
		return p.echo && p.logprobs
	case generate:
		return p.returnLogprob && p.logprobStart >= 0 && p.logprobStart < int64(p.opt.BlockSize)
	}
	return false
}

// start returns the value of logprob_start_len, or the first of a list; -1 if there
// is none.
func (p *parse) start(v span) int64 {
	if v.first(p.body) == '[' {
		c := enter(p.body, v.start, 0)
		if !c.next() {
			return -1
		}
		v = c.value()
	}
	if n, ok := integer(v.of(p.body)); ok {
		return n
	}
	return -1
}
