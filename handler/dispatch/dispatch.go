// Package dispatch takes one request over all its attempts: it selects a worker, sends the
// request, judges what comes back, retries, and reports how it ended. Caddy's reverse proxy
// makes the loop, and enters here by two doors: Select and RoundTrip.
package dispatch

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// routeKey is the context key of a request's route.
type routeKey struct{}

// Dispatch is one request on its way, over all its attempts. Only the goroutine
// that serves the request touches it, but for what is atomic.
type Dispatch struct {
	*Dispatcher
	plan  *plan.Plan
	start time.Time
	ready time.Time // its body was read
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields

	scratch     *pool.Scratch // nil outside choose and explainPlan
	offered     reverseproxy.UpstreamPool
	model       string // the one that the worker must be known to serve, if any
	session     string // the key that the session is bound by, empty if there is none
	attempt     *Attempt
	attempts    int
	suspects    int             // of these, those that broke and may have reached an engine
	tried       []*pool.Worker  // in this round over the workers
	usual       [4]*pool.Worker // where tried begins: there are seldom more
	exhausted   bool            // nobody is left: give what there is
	retryWanted bool            // the proxy is to make another attempt
	held        heldAnswer
	failure     error                  // of the last attempt
	last        *reverseproxy.Upstream // the last one selected

	wait waiting // while all workers are full

	Body *body.Replay  // until an answer is forwarded
	next FollowUp      // keeps it longer; nil if nothing follows
	lazy *body.Lazy    // what the proxy has of it
	sent *http.Request // of the last attempt

	answer   *delivery // of the attempt that answers the client
	bound    uint64    // version of the session's binding as last seen; 0 = none
	home     uint64    // the same of plan.session.key, which may be another key
	seenAt   kvscore.Target
	keptFor  time.Duration // its time to live
	cached   int64         // tokens, as the engine reported them; -1 is unknown
	err      error
	returned bool // false in finish: the proxy panicked, as it does to abort
	trace    *routeTrace
	dry      bool         // it explains what would be chosen, and changes nothing
	dryTable *pool.Table  // the one that it explains by
	only     only         // the worker that it never leaves, if there is one
	cut      nvext.Grants // what of its engines' own members was cut out
	apart    bool         // it goes only where its cache is kept apart
}

// Attempt is one try on one worker.
type Attempt struct {
	pool.Stream
	lease  *kvscore.Lease
	terms  kvscore.Candidate
	reason string
	prompt promptLength
	mark   uint64 // of the worker's health
	slot   bool   // it has one of the worker's
	bound  bool   // no policy was asked, so there is no cost
	over   bool
	guard  *guard    // what may end it; nil if nothing may
	answer *delivery // if it is one; nil while there is none
}

// Reasons of a choice.
const (
	reasonSession = "session" // the worker is the one that the session is bound to
	reasonOverlap = "overlap"
	reasonLoad    = "load"
	// the choice is not the router's
	ReasonPin      = "pin"
	ReasonResponse = "response"
)

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

// Begin begins to dispatch a request, and takes over the plan's body. The error is a
// refusal; the plan then keeps its body.
func (d *Dispatcher) Begin(r *http.Request, p *plan.Plan, start time.Time) (*Dispatch, error) {
	if refused := d.checkModel(p); refused != nil {
		return nil, refused
	}
	rt := &Dispatch{Dispatcher: d, plan: p, start: start, ready: time.Now(), Body: p.Body, cached: -1}
	rt.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if err := rt.narrow(r); err != nil {
		return nil, err
	}
	rt.CountDropped(p)
	rt.noticeIneffective()
	d.Pool.Spending.Request(rt.ready)
	d.FollowUps.Arrived(p)
	rt.tried = rt.usual[:0]
	p.Body = nil
	rt.extra, _ = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	rt.repl.Map(rt.placeholder)
	if p.Fallback != "" {
		rt.FallBack(p.Fallback)
	}
	return rt, nil
}

// Settle ends what the proxy has left open: it gives the client an answer that was held
// back, or returns the error that the client must get. err is what the proxy returned.
func (rt *Dispatch) Settle(w http.ResponseWriter, r *http.Request, err error) error {
	rt.err, rt.returned = err, true
	rt.noticeEncoding(w)
	if rt.err == nil || rt.writeHeld(w) {
		rt.err = nil
		return nil
	}
	if rt.answer != nil || rt.plan.API == nil || r.Context().Err() != nil {
		return rt.err
	}
	if rt.wait.turnedAway != nil {
		return rt.wait.turnedAway
	}
	rt.Logger.Error("no worker answered", zap.String("pool", rt.Pool.Name), zap.Error(rt.err))
	return rt.unserved(rt.err)
}

// FallBack takes in that the request is routed with less than full knowledge.
func (d *Dispatcher) FallBack(reason string) {
	d.Metrics.fallbacks.WithLabelValues(d.Pool.Name, reason).Inc()
	d.Pool.Incidents.Raise(time.Now(), "fallback "+reason, d.Pool.Logger)
}

// Request returns the request as the proxy gets it.
func (rt *Dispatch) Request(r *http.Request) *http.Request {
	out := r.WithContext(context.WithValue(rt.startTrace(r.Context()), routeKey{}, rt))
	out.Header = rt.plan.WithoutRouting(r.Header)
	out.Trailer = nil // it could route, and engines read none
	if rt.Body == nil {
		out.Body = rt.plan.Stream
		return out
	}
	out.Body, out.TransferEncoding = http.NoBody, nil
	if rt.Body.Size > 0 || r.ContentLength < 0 {
		rt.lazy = &body.Lazy{Of: rt.Body}
		out.Body = rt.lazy
	}
	if r.ContentLength < 0 {
		return out // it is sent in chunks, as it came
	}
	out.ContentLength = rt.Body.Size
	if r.ContentLength != out.ContentLength && r.Header.Get("Content-Length") != "" {
		out.Header = maps.Clone(out.Header) // the server's own is shared
		out.Header.Set("Content-Length", strconv.FormatInt(out.ContentLength, 10))
	}
	return out
}

// Selector is the proxy's selection policy. The choice itself is the route's.
type Selector struct{}

// Select implements reverseproxy.Selector.
func (Selector) Select(offered reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	rt, ok := r.Context().Value(routeKey{}).(*Dispatch)
	if !ok {
		return nil
	}
	return rt.choose(r.Context(), offered)
}

// choose selects the upstream of the next attempt and books it. It returns nil
// if the proxy is to ask again later.
func (rt *Dispatch) choose(ctx context.Context, offered reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	rt.endAttempt(false)
	rt.takeScratch()
	defer rt.returnScratch()
	rt.offered, rt.retryWanted, rt.answer = offered, false, nil
	for {
		t := time.Now()
		found := rt.candidates(rt.offered, t)
		if !found && rt.wait.granted != nil {
			rt.giveBackGranted() // its worker cannot be used any more
			continue
		}
		if !found && len(rt.scratch.Full) == 0 {
			if rt.anotherRound() {
				if !rt.withoutScratch(ctx, rt.pause) {
					rt.wait.left = ctx.Err()
					return rt.leave()
				}
				rt.tried = rt.tried[:0] // another round, as the operator wants it
				t = time.Now()
				found = rt.candidates(rt.offered, t)
			}
			if !found && len(rt.scratch.Full) == 0 {
				return rt.noWorker()
			}
		}
		if found {
			if up := rt.book(t); up != nil {
				return up
			}
			if rt.Pool.Queue.Length.Load() == 0 {
				continue // the worker has just filled up
			}
		}
		if !rt.withoutScratch(ctx, rt.await) {
			return rt.leave()
		}
	}
}

// pause waits for the operator's lb_try_interval. It returns false if the client
// left meanwhile.
func (rt *Dispatch) pause(ctx context.Context) bool {
	timer := time.NewTimer(max(rt.Limits.Interval, leastInterval))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// noWorker returns the upstream of a request that has no worker left: the transport
// answers with the last failure. It is nil if the operator's retries make the proxy
// ask again.
func (rt *Dispatch) noWorker() *reverseproxy.Upstream {
	switch {
	case rt.anotherRound():
		rt.attempts++
		rt.retryWanted = true
		return nil
	case rt.last != nil:
		rt.exhausted = true
		return rt.last
	}
	rt.exhausted = true
	return noUpstream
}

// book lets the policy choose among the candidates, unless the session is
// bound to one, and books the choice. It returns nil if the worker filled up
// meanwhile, or a queued request has first claim to its room.
func (rt *Dispatch) book(t time.Time) *reverseproxy.Upstream {
	bound := rt.boundPosition()
	request := rt.score()
	i, lease := rt.Pool.Scheduler.SelectAmong(t, request, rt.scratch.Targets, bound, rt.policy(), &rt.scratch.Sel)
	rt.noticeChoice(t)
	rt.noticeLeaving(bound, i)
	if !rt.takeSlot(rt.scratch.Workers[i]) {
		lease.End(false, nil)
		return nil
	}
	a := &Attempt{
		Stream: pool.Stream{Worker: rt.scratch.Workers[i], Target: rt.scratch.Targets[i].Target, Begun: t, Work: rt.work()},
		lease:  lease, terms: rt.scratch.Sel.Candidates[i], slot: rt.plan.Computes, bound: bound >= 0,
	}
	a.reason = rt.reasonOf(bound, &a.terms)
	a.mark = a.Worker.Health.Admit()
	a.prompt = promptLength{rt.scratch.Sel.Tokens, rt.scratch.Sel.Known}
	a.Ahead = a.terms.PrefillTokens + a.prompt.tokens
	a.Worker.Progress.Begin(&a.Stream)
	if rt.plan.Computes {
		rt.Pool.Yield(a.Worker) // what is computed beforehand must cost nobody anything
	}
	rt.attempts++
	rt.attempt, rt.last = a, rt.scratch.Upstreams[i]
	rt.tried = append(rt.tried, a.Worker)
	rt.show(a)
	rt.trace.selected(rt, a, t)
	if rt.Shadow != nil && bound < 0 && rt.plan.Request != nil {
		rt.Shadow.compare(rt, i)
	}
	return rt.last
}

// noticeLeaving records, after a choice, whether the session stays bound though the
// policy has sent this turn elsewhere: it does while its worker holds the prompt.
func (rt *Dispatch) noticeLeaving(bound, chosen int) {
	if bound < 0 && chosen != rt.scratch.Sel.Home && rt.scratch.Sel.HomeHolds() {
		rt.wait.away = true
	}
}

// noticeChoice logs what degraded the choice.
func (rt *Dispatch) noticeChoice(t time.Time) {
	if rt.scratch.Sel.Fault {
		rt.Pool.Incidents.Raise(t, incidentFault, rt.Pool.Logger)
	}
	if rt.scratch.Sel.Unknown > 0 {
		rt.Pool.Incidents.Raise(t, incidentUnknown, rt.Pool.Logger)
	}
}

// Conditions that last, as the log and the admin API say them.
const (
	incidentFault   = "policy that returns no candidate or changes their list, the least loaded worker is taken"
	incidentUnknown = "unknown load of some workers (the median of the others is assumed)"
)

// policy returns the policy that chooses for this request.
func (rt *Dispatch) policy() kvscore.Policy {
	if rt.plan.Request == nil {
		return &passThroughPolicy
	}
	return rt.Policy
}

// reasonOf returns why a candidate was chosen.
func (rt *Dispatch) reasonOf(bound int, c *kvscore.Candidate) string {
	switch {
	case rt.pinned():
		return rt.only.reason
	case bound >= 0 || rt.bound != 0 && c.Target == rt.seenAt:
		return reasonSession
	case c.OverlapBlocks > 0:
		return reasonOverlap
	}
	return reasonLoad
}

// candidates fills in the targets to choose from and tells whether there are
// any.
func (rt *Dispatch) candidates(offered reverseproxy.UpstreamPool, t time.Time) bool {
	if sec := t.Unix(); rt.Pool.LastRequest.Load() != sec {
		rt.Pool.LastRequest.Store(sec)
	}
	used, found := rt.gather(offered, t)
	switch {
	case rt.pinned(): // whatever it is at
	case used.Draining:
		rt.Pool.Incidents.Raise(t, "no worker left but draining ones, which are used all the same", rt.Pool.Logger)
	case used.Marked && len(rt.tried) == 0:
		rt.Pool.Incidents.Raise(t, "all workers marked down, and used all the same", rt.Pool.Logger)
	}
	return found
}

// workersOffered returns the workers behind the upstreams that the proxy has.
func (rt *Dispatch) workersOffered() []*pool.Worker {
	list := make([]*pool.Worker, 0, len(rt.offered))
	for _, row := range rt.table(rt.offered).Rows {
		list = append(list, row.Worker)
	}
	return list
}

// otherLeft tells whether a worker is available that was not tried.
func (rt *Dispatch) otherLeft() bool {
	want, rows := rt.wants(), rt.table(rt.offered).Rows
	for i, up := range rt.offered {
		if w := rows[i].Worker; up.Available() && !slices.Contains(rt.tried, w) && rt.Pool.Fits(&want, rt.model, w) {
			return true
		}
	}
	return false
}

// boundPosition returns the position of the target that the choice is already made
// for: the request's pin, or the session's target unless the policy may leave it. It is
// -1 if there is none among the candidates.
func (rt *Dispatch) boundPosition() int {
	target := rt.boundTo()
	if rt.pinned() {
		return rt.pinnedPosition(target)
	}
	if rt.bound == 0 {
		return -1
	}
	rt.wait.away = rt.isAway(target)
	if rt.mayLeave() {
		return -1
	}
	return slices.IndexFunc(rt.scratch.Targets, func(t kvscore.TargetRef) bool { return t.Target == target })
}

// placeholder returns the value of one of our placeholders.
func (rt *Dispatch) placeholder(key string) (any, bool) {
	name, ours := strings.CutPrefix(key, "http.kv_router.")
	if !ours {
		return nil, false
	}
	a := rt.shown()
	switch {
	case name == "session":
		return rt.plan.Session.Key, rt.plan.Session.Key != ""
	case name == "cached_tokens":
		return rt.cached, rt.cached >= 0
	case a == nil:
		return nil, false
	}
	switch name {
	case "worker":
		return a.Target.Worker, true
	case "dp_rank":
		return a.Target.Rank, true
	case "overlap_blocks":
		return int64(a.terms.OverlapBlocks), true
	case "predicted_cached_tokens":
		return a.terms.OverlapTokens, true
	case "reason":
		return a.reason, true
	}
	return nil, false
}

// shown returns the attempt that the operator is shown: the one that answers the
// client, else the latest; nil if there was none.
func (rt *Dispatch) shown() *Attempt {
	if rt.answer != nil {
		return rt.answer.attempt
	}
	return rt.attempt
}

// show logs the choice.
func (rt *Dispatch) show(a *Attempt) {
	if c := rt.Logger.Check(zap.DebugLevel, ""); c != nil {
		c.Message = routingMessage(a)
		fields := []zap.Field{
			zap.String("upstream", a.Worker.Dial), zap.String("reason", a.reason), zap.Int64("prompt_tokens", a.prompt.tokens),
			zap.Float64("predicted_ttft_ms", a.terms.TTFT()), zap.Float64("cost", a.terms.Cost),
		}
		if rt.costsTime(a) {
			fields = append(fields, zap.Object("cost_terms_ms", termFields(a.terms.Terms)))
		}
		c.Write(fields...)
	}
}

// termFields are the terms of a cost as the log shows them, in milliseconds.
type termFields kvscore.Terms

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (f termFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddFloat64("wait", f.Wait)
	e.AddFloat64("prefill", f.Prefill)
	e.AddFloat64("delay", f.Delay)
	e.AddFloat64("decode", f.Decode)
	e.AddFloat64("turns", f.Turns)
	e.AddFloat64("leave", f.Leave)
	return nil
}

// costsTime tells whether the attempt's cost is in milliseconds, and has terms.
func (rt *Dispatch) costsTime(a *Attempt) bool {
	return !a.bound && kvscore.CostUnit(rt.policy()) == kvscore.UnitMilliseconds
}

// endAttempt ends the attempt under way, if there is one. computed says that
// the worker has computed the prompt.
func (rt *Dispatch) endAttempt(computed bool) {
	a := rt.attempt
	if a == nil || a.over {
		return
	}
	a.over = true
	a.Worker.Health.Leave(a.mark)
	a.Worker.Progress.End(&a.Stream)
	var answer []uint64
	if computed && rt.answer != nil {
		answer = rt.answer.Blocks
	}
	a.lease.End(computed, answer)
	if a.slot {
		rt.Pool.FreeSlot(a.Worker)
	}
}
