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

// Give takes in that the engine computes other token ids than the body's prompt:
// raw, a valid JSON list of them. From then on the request is one whose prompt
// these are, with the same Blocks and Root as if the client had sent them as
// that; the Options must be those that it was parsed with. It is not ok, and
// nothing is known of the prompt any more, if raw has no ids or something else, or
// if the body has more that the engine would compute. It is for whoever has just
// parsed the request, before others see it. It keeps no reference to raw.
func (r *Request) Give(raw []byte, o Options) (ok bool) {
	r.Forget()
	v := rawjson.Span{End: len(raw)}
	if r.blended || v.First(raw) != '[' {
		return false
	}
	p := parse{req: r, opt: o.withDefaults(), body: raw}
	n, ok := p.tokens(v, true)
	if !ok {
		r.Blocks = nil
		return false
	}
	r.Kind, r.Tokens, r.First, r.block = Tokens, n, n, p.opt.BlockSize
	r.Media, r.MediaTokens, r.prompts, r.ids = 0, 0, 1, rawjson.Span{}
	r.Root = r.root()
	return true
}
