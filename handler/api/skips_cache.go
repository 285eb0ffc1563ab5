package api

// skipsCache tells whether the request is for log probabilities of the prompt's
// own tokens, in the words of its API. vLLM has none of the prompt cached then
// (protocol.py of both APIs sets prompt_logprobs from top_logprobs, which is 0 by
// default, or from logprobs), and SGLang none from logprob_start_len on.
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

// start reads logprob_start_len: a number, or a list of which the first counts.
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
