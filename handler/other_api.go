package handler

import (
	"bytes"
	"errors"
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"go.uber.org/zap"
)

// maxOther is the longest body of a request for no known API that is looked
// into, in bytes.
const maxOther = 1 << 20

// isOther tells whether a request that is for no known API has a body that may
// name a model, or say something to the router, as those of /tokenize and
// /v1/images/generations do. Engines read JSON whatever its Content-Encoding
// says, some also where the Content-Type is missing or another one's JSON.
func isOther(r *http.Request) bool {
	if r.Method != http.MethodPost || r.Body == nil || r.Body == http.NoBody || r.ContentLength > maxOther {
		return false
	}
	kind := mediaType(r.Header.Get("Content-Type"))
	return kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// otherAPI plans such a request: by load, among the workers with its model. A
// longer one than is looked into is streamed through.
func (h *Handler) otherAPI(r *http.Request) (*plan, error) {
	body, rest, err := readBody(r.Body, r.ContentLength, maxOther, &h.pool.bodies)
	if err != nil {
		return nil, unreadable(nil, err)
	}
	if rest != nil {
		p := h.passThrough(r, "")
		p.stream = rest
		return p, nil
	}
	p := &plan{body: replayOf(body, body.data)}
	p.score.Streamed = true
	req, err := api.Parse(api.Unplanned, body.data, api.Options{})
	if err != nil {
		if bytes.HasPrefix(bytes.TrimSpace(body.data), []byte("{")) && h.mayTellDynamo(r) {
			p.done()
			return nil, &ownError{api.Unplanned, http.StatusBadRequest, codeUnreadable, "", errUnreadOther}
		}
		p.model = strings.Clone(api.Model(body.data))
		return p, nil
	}
	detach(req)
	p.model, p.other = req.Model, req
	p.speaks = req.NVExt != nil || req.NullNVExt
	return p, nil
}

var errUnreadOther = errors.New("the body must be JSON that can be read, as what it says to the router is not all granted")

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
	return r.Method == http.MethodPost && api.For(r.URL.Path) == nil && engine.Infers(r.URL.Path)
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
		rt.h.metrics.dropped.WithLabelValues(rt.pool.name, name).Inc()
	}
	if c := rt.h.logger.Check(zap.DebugLevel, "members that steer the engine are cut out"); c != nil {
		c.Write(zap.Stringer("not_granted", grants))
	}
}
