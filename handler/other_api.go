package handler

import (
	"bufio"
	"bytes"
	"errors"
	"io"
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

// readsOther returns how long a body for no known API may be that is read, 0 if
// none is. It may name a model, or say something to the router, as those of
// /tokenize and /v1/images/generations do. Engines read JSON whatever its
// Content-Encoding says, and where they compute, some whatever its Content-Type.
func (h *Handler) readsOther(r *http.Request) int64 {
	if engine.Reads(r.URL.Path) {
		return h.MaxBody
	}
	if kind := mediaType(r.Header.Get("Content-Type")); kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json") {
		return maxOther
	}
	return 0
}

// otherAPI plans such a request: by load, among the workers with its model.
// What is not read is streamed through, if it may be.
func (h *Handler) otherAPI(r *http.Request) (*plan, error) {
	limit := h.readsOther(r)
	switch {
	case limit == 0:
		return h.passThrough(r, ""), nil
	case engine.Reads(r.URL.Path) && strings.HasPrefix(mediaType(r.Header.Get("Content-Type")), "multipart/"):
		return h.form(r)
	case r.ContentLength > limit:
		return h.unreadOther(r, fallbackOversized), nil
	case h.pool.bodies.Load()+max(r.ContentLength, 0) > maxBodies:
		return h.unreadOther(r, fallbackMemory), nil
	}
	body, rest, err := readBody(r.Body, r.ContentLength, limit, &h.pool.bodies)
	if err != nil {
		return nil, unreadable(nil, err)
	}
	if rest != nil {
		why := fallbackOversized
		if rest.noRoom {
			why = fallbackMemory
		}
		p := h.unreadOther(r, why)
		p.stream = rest
		return p, nil
	}
	p := &plan{body: replayOf(body, body.data), repeatable: idempotent(r.Method)}
	p.score.Streamed = true
	req, err := api.Parse(api.Unplanned, body.data, api.Options{})
	if err != nil {
		text := bytes.TrimSpace(body.data)
		if engine.Reads(r.URL.Path) && len(text) > 0 || bytes.HasPrefix(text, []byte("{")) {
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

// unreadOther plans a request for no known API whose body is not read.
func (h *Handler) unreadOther(r *http.Request, why string) *plan {
	p := h.passThrough(r, "")
	if engine.Reads(r.URL.Path) {
		p.unread = why
	}
	return p
}

// form plans a request whose body is said to be of several parts, as those with
// audio and images are. One that begins as such is no JSON, and may be long.
func (h *Handler) form(r *http.Request) (*plan, error) {
	body := bufio.NewReaderSize(r.Body, 16)
	begin, err := body.Peek(len(formBegins))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, unreadable(nil, err)
	}
	p := h.passThrough(r, "")
	p.stream = &once{ReadCloser: struct {
		io.Reader
		io.Closer
	}{body, r.Body}}
	if string(begin) != formBegins {
		p.unread = fallbackMalformed
	}
	return p, nil
}

// formBegins is what the boundaries of a multipart body begin with.
const formBegins = "--"

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
		rt.h.metrics.dropped.WithLabelValues(rt.pool.name, name).Inc()
	}
	if c := rt.h.logger.Check(zap.DebugLevel, "members that steer the engine are cut out"); c != nil {
		c.Write(zap.Stringer("not_granted", grants))
	}
}
