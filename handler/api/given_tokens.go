package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// isBlended tells whether an engine that is given token ids in place of the
// prompt would compute something else than these: media take places among them,
// embeddings and other ids go before.
func (p *parse) isBlended() bool {
	if p.unlike || p.req.Media > 0 || p.beside(nil) > 0 {
		return true
	}
	_, ids := p.req.API.(tokensIn) // whose own ids are what is replaced
	return !ids && p.ids.HasContent(p.body)
}

// Give replaces the request's prompt by other token ids: raw, a valid JSON list of
// them. The request then has the same Blocks and Root as if the client had sent
// these as its prompt; o must be what it was parsed with. Give returns false, and
// changes nothing, if raw has no ids or something else, or if the engine would
// compute more of the body than the ids. It must be called before the request is
// shared, and keeps no reference to raw.
func (r *Request) Give(raw []byte, o Options) (ok bool) {
	v := rawjson.Span{End: len(raw)}
	if r.blended || v.First(raw) != '[' {
		return false
	}
	p := parse{req: r, opt: o.withDefaults(), body: raw}
	n, ok := p.tokens(v, true)
	if !ok {
		return false
	}
	r.Kind, r.Tokens, r.First, r.block = Tokens, n, n, p.opt.BlockSize
	r.Bytes, r.Media, r.MediaTokens, r.prompts, r.ids, r.steady = 0, 0, 0, 1, rawjson.Span{}, false
	r.Root = r.root()
	return true
}
