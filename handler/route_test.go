package handler

// newTestRoute returns a route of the plan as newRoute makes it, without a
// request behind it. All tests that need such a route use this constructor.
func newTestRoute(h *Handler, p *plan) *route {
	rt := &route{h: h, pool: h.pool, plan: p, start: now(), cached: -1}
	rt.ready, rt.tried = rt.start, rt.usual[:0]
	return rt
}

// newTestAttempt returns a route that owns the plan's body, with an attempt on the
// worker's first rank.
func newTestAttempt(h *Handler, p *plan, w *worker) *route {
	rt := newTestRoute(h, p)
	rt.body, rt.attempt = p.body, &attempt{worker: w, target: w.target(0)}
	return rt
}
