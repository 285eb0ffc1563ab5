package handler

import (
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"go.uber.org/zap"
)

// maxOther is the longest body of a request for no known API that is looked
// into where no engine is known to compute anything, in bytes.
const maxOther = 1 << 20

// otherAPI plans such a request: by load, among the workers with its model. It may
// name one, or say something to the router, as those of /tokenize and
// /v1/images/generations do. Engines read JSON whatever its Content-Encoding says,
// and where they compute, some whatever its Content-Type. What is not read is
// streamed through, if it may be.
func (h *Handler) otherAPI(r *http.Request) (*plan, error) {
	limit, said, reads := int64(maxOther), saysJSON(r.Header), engine.Reads(r.URL.Path)
	switch {
	case reads:
		limit = h.MaxBody
	case !said || r.ContentLength < 0 && !h.maySteer(r):
		return h.passThrough(r, ""), nil // it may be a conversation, of which the next word has to wait for an answer
	}
	if p, err := h.notJSON(r, ""); err != nil {
		return nil, unreadable(nil, err)
	} else if p != nil {
		return p, nil
	}
	body, rest, why, err := h.take(r, limit)
	if err != nil {
		return nil, unreadable(nil, err)
	}
	if body == nil {
		p := h.passThrough(r, "")
		if reads {
			p.unread = why
		}
		if rest != nil {
			p.stream = rest
		}
		return p, nil
	}
	p := &plan{body: replayOf(body, body.data), repeatable: idempotent(r.Method)}
	p.score.Streamed = true
	req, err := api.Parse(api.Unplanned, body.data, api.Options{})
	if err != nil || req.Vertex {
		if mayBeJSON(r.Header, body.data) {
			p.unread = fallbackMalformed
		}
		p.model = strings.Clone(api.Model(body.data))
		return p, nil
	}
	detach(req)
	p.model, p.other = req.Model, req
	p.speaks = req.NVExt != nil || req.NullNVExt
	return p, nil
}

// takeOther returns the nvext of a request for no known API, and lets go of it.
func (p *plan) takeOther() (raw []byte) {
	if p.other != nil {
		raw, p.other.NVExt = p.other.NVExt, nil
	}
	return raw
}

// read returns what was read of the request, nil if nothing was.
func (p *plan) read() *api.Request {
	if p.request != nil {
		return p.request
	}
	return p.other
}

// steers tells whether the body has members by which engines are steered.
func (p *plan) steers() bool {
	read := p.read()
	return read != nil && read.Steers
}

// infersUnplanned tells whether a request makes some engine compute something,
// at a path that belongs to no known API.
func infersUnplanned(r *http.Request) bool {
	return posts(r.Method) && api.For(r.URL.Path) == nil && engine.Infers(r.URL.Path)
}

// orUnplanned returns an API for the shape of its errors.
func orUnplanned(a api.API) api.API {
	if a == nil {
		return api.Unplanned
	}
	return a
}

// noticeCut counts what was cut out of a body for want of a grant, once for each
// request.
func (rt *route) noticeCut(grants nvext.Grants) {
	grants &^= rt.cut | rt.plan.dropped
	if grants == 0 {
		return
	}
	rt.cut |= grants
	for name := range grants.Names {
		rt.metrics.dropped.WithLabelValues(rt.pool.name, name).Inc()
	}
	if c := rt.logger.Check(zap.DebugLevel, "members that steer the engine are cut out"); c != nil {
		c.Write(zap.Stringer("not_granted", grants))
	}
}
