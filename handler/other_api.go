package handler

import (
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"go.uber.org/zap"
)

// saysJSON tells whether a header says that its body is JSON.
func saysJSON(h http.Header) bool {
	kind := body.MediaType(h)
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// otherAPI plans a request for no known API whose body was read: by load, among
// the workers with its model.
func otherAPI(r *http.Request, read *body.Buffer) *plan {
	p := &plan{body: body.NewReplay(read, read.Data), repeatable: idempotent(r.Method)}
	p.score.Streamed = true
	req, err := api.Parse(api.Unplanned, read.Data, api.Options{})
	if err != nil || req.Vertex {
		p.cannotRead(fallbackMalformed)
		p.model = strings.Clone(api.Model(read.Data))
		return p
	}
	detach(req)
	p.model, p.other = req.Model, req
	p.speaks = req.NVExt != nil || req.NullNVExt
	return p
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
