package handler

import (
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// routeKey is the context key of a request's route.
type routeKey struct{}

// route is one request on its way, over all its attempts. Only the goroutine
// that serves the request touches it, but for what is atomic.
type route struct {
	h     *Handler
	pool  *pool
	plan  *plan
	start time.Time
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields

	// of the selection under way or last made
	sel       kvscore.Selection
	targets   []kvscore.Target
	upstreams []*reverseproxy.Upstream // of targets
	workers   []*worker                // of targets
	offered   reverseproxy.UpstreamPool
	attempt   *attempt
	tried     []*worker
	spent     bool                   // nobody is left: give what there is
	held      *http.Response         // an answer of an earlier attempt, if nobody has a better
	failure   error                  // of the last attempt
	last      *reverseproxy.Upstream // the last one selected

	answer   *observer // of the attempt that answers the client
	bound    uint64    // version of the session's binding as last seen; 0 = none
	seenAt   kvscore.Target
	err      error
	returned bool // false in finish: the proxy panicked, as it does to abort
}

// attempt is one try on one worker.
type attempt struct {
	worker *worker
	lease  *kvscore.Lease
	terms  kvscore.Candidate
	reason string
	begun  time.Time
	over   bool
}

// Reasons of a choice.
const (
	reasonSession = "session"
	reasonOverlap = "overlap"
	reasonLoad    = "load"
)

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

// random is the process's source of randomness.
type random struct{}

// IntN implements kvscore.Rand.
func (random) IntN(n int) int { return rand.IntN(n) } //nolint:gosec // choices are no secrets

// Float64 implements kvscore.Rand.
func (random) Float64() float64 { return rand.Float64() } //nolint:gosec // choices are no secrets

func (h *Handler) newRoute(r *http.Request) (*route, error) {
	h.adopt()
	start := now()
	p, err := h.plan(r)
	if err != nil {
		return nil, err
	}
	rt := &route{h: h, pool: h.pool, plan: p, start: start}
	rt.sel.Rand = random{}
	rt.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	rt.extra, _ = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	if p.session != "" {
		rt.repl.Set("http.kv_router.session", p.session)
	}
	if p.fallback != "" {
		rt.fallBack(p.fallback)
	}
	return rt, nil
}

// fallBack takes in that the request is routed with less than full knowledge.
func (rt *route) fallBack(reason string) {
	rt.h.metrics.fallbacks.WithLabelValues(rt.pool.name, reason).Inc()
	rt.pool.incidents.met(rt.start, "fallback "+reason, rt.pool.logger)
}

// request returns the request with the body that goes to the workers.
func (rt *route) request(r *http.Request) *http.Request {
	out := *r
	if rt.plan.body == nil {
		out.Body = rt.plan.stream
		return &out
	}
	out.Body, out.ContentLength = rt.plan.body.open(), rt.plan.body.size
	out.TransferEncoding = nil
	if r.Header.Get("Content-Length") != "" {
		out.Header = maps.Clone(r.Header) // the server's own is shared
		out.Header.Set("Content-Length", strconv.FormatInt(out.ContentLength, 10))
	}
	return &out
}

// selector is the proxy's selection policy. The choice itself is the route's.
type selector struct{}

// Select implements reverseproxy.Selector.
func (selector) Select(pool reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	rt, ok := r.Context().Value(routeKey{}).(*route)
	if !ok {
		return nil
	}
	return rt.choose(pool)
}

// choose selects the upstream of the next attempt and books it.
func (rt *route) choose(pool reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	rt.endAttempt(false)
	rt.offered = pool
	t := now()
	if !rt.candidates(pool, t) {
		if rt.last == nil {
			return nil
		}
		rt.spent = true // the transport gives the answer that it has held back
		return rt.last
	}
	bound := rt.boundPosition()
	policy := rt.h.policy
	if rt.plan.request == nil {
		policy = &passThroughPolicy
	}
	i, lease := rt.pool.scheduler.Select(t, &rt.plan.score, rt.targets, bound, policy, &rt.sel)
	a := &attempt{worker: rt.workers[i], lease: lease, terms: rt.sel.Candidates[i], begun: t, reason: reasonLoad}
	switch {
	case bound >= 0:
		a.reason = reasonSession
	case a.terms.OverlapBlocks > 0:
		a.reason = reasonOverlap
	}
	a.worker.active.Add(1)
	rt.attempt, rt.last = a, rt.upstreams[i]
	rt.tried = append(rt.tried, a.worker)
	rt.show(a)
	return rt.last
}

// candidates fills in the targets to choose from: workers that are available
// and were not tried; of these, those that did well lately, if there are any.
func (rt *route) candidates(pool reverseproxy.UpstreamPool, t time.Time) bool {
	for _, marked := range [...]bool{false, true} {
		rt.targets, rt.upstreams, rt.workers = rt.targets[:0], rt.upstreams[:0], rt.workers[:0]
		for _, up := range pool {
			if !up.Available() {
				continue
			}
			w := rt.pool.worker(up.Dial)
			w.seen.Store(t.Unix())
			if slices.Contains(rt.tried, w) || slices.Contains(rt.workers, w) {
				continue
			}
			if !marked && !w.health.available(t, w.active.Load()) {
				continue
			}
			rt.targets = append(rt.targets, w.target)
			rt.upstreams = append(rt.upstreams, up)
			rt.workers = append(rt.workers, w)
		}
		if len(rt.targets) > 0 {
			return true
		}
	}
	return false
}

// otherLeft tells whether a worker is available that was not tried.
func (rt *route) otherLeft() bool {
	for _, up := range rt.offered {
		if up.Available() && !slices.Contains(rt.tried, rt.pool.worker(up.Dial)) {
			return true
		}
	}
	return false
}

// boundPosition returns the position of the session's target, -1 if it has
// none among the candidates.
func (rt *route) boundPosition() int {
	if rt.plan.session == "" {
		return -1
	}
	b, ok := rt.pool.sessions.Peek(rt.plan.session)
	if !ok {
		rt.bound = 0
		return -1
	}
	rt.bound, rt.seenAt = b.Version, b.Target
	return slices.Index(rt.targets, b.Target)
}

// show tells the operator of the choice.
func (rt *route) show(a *attempt) {
	target := a.lease.Target()
	rt.repl.Set("http.kv_router.worker", target.Worker)
	rt.repl.Set("http.kv_router.dp_rank", target.Rank)
	rt.repl.Set("http.kv_router.overlap_blocks", int64(a.terms.OverlapBlocks))
	rt.repl.Set("http.kv_router.predicted_cached_tokens", a.terms.OverlapTokens)
	rt.repl.Set("http.kv_router.reason", a.reason)
	if c := rt.h.logger.Check(zap.DebugLevel, routingMessage(a)); c != nil {
		c.Write(zap.String("upstream", a.worker.dial), zap.String("reason", a.reason),
			zap.Float64("cost", a.terms.Cost), zap.Int64("prompt_tokens", rt.plan.score.Tokens))
	}
}

// endAttempt ends the attempt under way, if there is one. computed says that
// the worker has computed the prompt.
func (rt *route) endAttempt(computed bool) {
	a := rt.attempt
	if a == nil || a.over {
		return
	}
	a.over = true
	a.worker.active.Add(-1)
	var answer []uint64
	if computed && rt.answer != nil {
		answer = rt.answer.prediction()
	}
	a.lease.End(computed, answer)
}
