package handler

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// A request with token_data has two prompts: these ids, and what the rest of its
// body says. Which of them an engine computes depends on its type and the API.
// What is booked and compared must be that one, or else a client could book
// nothing for much work, and have the router believe that caches hold what they
// do not.

// givePrompt settles which prompt of a request with token_data is planned: the
// one that all workers compute which may serve it. If that is not the same with
// all, nothing is known of the prompt.
func (h *Handler) givePrompt(r *http.Request, p *plan, req *api.Request, opts api.Options) {
	if p.ext.TokenCount == 0 {
		return
	}
	p.prompt = h.promptOf(r, p)
	switch p.prompt {
	case engine.TokenPrompt:
		at := p.ext.TokenSpan
		if !req.Give(req.NVExt[at.Start:at.End], opts) {
			p.prompt = engine.EitherPrompt
		}
	case engine.EitherPrompt:
		req.Forget()
	case engine.BodyPrompt: // as it was parsed
	}
}

// promptOf returns which prompt the workers compute that may serve a request.
func (h *Handler) promptOf(r *http.Request, p *plan) engine.Prompt {
	rt := h.dryRoute(r, p)
	if rt.narrow(r) != nil {
		return engine.EitherPrompt // it will be refused
	}
	h.awaitFirstLook(r.Context()) // which tells the types
	rt.offered = h.upstreams(r)
	rt.model = rt.modelFor(rt.offered)
	prompt, some := engine.EitherPrompt, false
	for _, w := range rt.workersOffered() {
		if !rt.fits(w) {
			continue
		}
		kind, _, _ := h.pool.engineOf(w)
		is := engine.PromptOf(kind, p.api.Name())
		if some && is != prompt {
			return engine.EitherPrompt
		}
		prompt, some = is, true
	}
	return prompt
}

// computesOther tells whether an engine that computes a prompt does not compute
// the one that was planned: it was another engine then.
func (p *plan) computesOther(is engine.Prompt) bool {
	return p.ext.TokenCount > 0 && p.prompt != engine.EitherPrompt && p.prompt != is
}
