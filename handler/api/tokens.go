package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// tokensIn is vLLM's /inference/v1/generate: token ids in, token ids out.
type tokensIn struct{ base }

func (tokensIn) Name() string { return NameTokens }

func (tokensIn) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "token_ids":
		p.main = v
	case "features", "content_parts": // media among the ids, which do not show them
		p.opaque = p.opaque || v.HasContent(p.body)
	case "sampling_params":
		p.sampling(v)
	}
}

func (tokensIn) prompt(p *parse) { p.input(p.main) }

func (tokensIn) event(a *Answer, b []byte, i int) bool { return a.chunk(b, i) }
