package handler

import (
	"context"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// newTestRoute returns a route of the plan as begin makes it, without a
// request behind it. All tests that need such a route use this constructor.
func newTestRoute(h *Handler, p *plan) *route {
	rt := &route{dispatcher: testDispatcher(h), plan: p, start: time.Now(), cached: -1}
	rt.ready, rt.tried = rt.start, rt.usual[:0]
	return rt
}

// newTestAttempt returns a route that owns the plan's body, with an attempt on the
// worker's first rank.
func newTestAttempt(h *Handler, p *plan, w *worker) *route {
	rt := newTestRoute(h, p)
	rt.body, rt.attempt = p.body, &attempt{stream: stream{worker: w, target: w.target(0)}}
	return rt
}

// testDispatcher returns the dispatcher of a handler that was not provisioned.
func testDispatcher(h *Handler) *dispatcher {
	if h.dispatcher == nil {
		h.dispatcher = new(dispatcher)
	}
	d := h.dispatcher
	d.pool, d.proxy, d.transport, d.client, d.active, d.metrics, d.figures, d.logger = h.pool, h.ReverseProxy, h.transport, h.client, h.policy, h.metrics, h.figures, h.logger
	if d.proxy == nil {
		d.proxy = new(reverseproxy.Handler)
	}
	d.unit, d.followUps = costUnit(h.policy), noFollowUps{}
	h.explainer = &explainer{dispatcher: d, reader: h.reader, config: h.config}
	return d
}

// noFollowUps makes no requests of the router's own.
type noFollowUps struct{}

func (noFollowUps) Arrived(*plan)                           {}
func (noFollowUps) Answering(turn, *http.Response) followUp { return nil }

// ended returns a context that has ended: a prober that has it probes nothing.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}
