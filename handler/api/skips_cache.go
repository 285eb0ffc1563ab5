package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// skipsCache tells whether the request asks for log probabilities of the prompt's
// own tokens. Then vLLM reuses nothing. With echo, vLLM sets prompt_logprobs from
// top_logprobs in chats (default 0), and from logprobs in completions (protocol.py
// of each API). SGLang reuses nothing from logprob_start_len on.
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
func (p *parse) start(v rawjson.Span) int64 {
	if n, ok := integer(firstOf(p.body, v).Of(p.body)); ok {
		return n
	}
	return -1
}
