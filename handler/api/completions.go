package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// completions is /v1/completions. Its prompt is plain text or token ids; the
// answer continues it directly.
type completions struct{ base }

func (completions) Name() string { return NameCompletions }
func (completions) traits() traits {
	return traits{asksUsage: true, joins: true, joinsText: true, object: "text_completion", chunk: "text_completion"}
}

func (completions) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "prompt":
		p.main = v
	case "logprobs":
		p.logprobs = !v.IsNull(p.body)
	}
}

func (completions) prompt(p *parse) {
	// With echo, vLLM sets prompt_logprobs from logprobs.
	p.req.SkipsCache = p.req.SkipsCache || p.echo && p.logprobs
	if !p.idsGiven() {
		p.input(p.main)
	}
}

func (completions) event(a *Answer, b []byte, i int) bool { return a.chunk(b, i) }
