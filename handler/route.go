package handler

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

// route is one request on its way, over all its attempts. Only the goroutine
// that serves the request touches it, but for what is atomic.
type route struct {
	*dispatcher
	plan  *plan.Plan
	start time.Time
	ready time.Time // its body was read
	repl  *caddy.Replacer
	extra *caddyhttp.ExtraLogFields

	scratch  *pool.Scratch // nil outside choose and explainPlan
	offered  reverseproxy.UpstreamPool
	model    string // the one that the worker must be known to serve, if any
	session  string // the key that the session is bound by, empty if there is none
	attempt  *attempt
	attempts int
	suspects int             // of these, those that broke and may have reached an engine
	tried    []*pool.Worker  // in this round over the workers
	usual    [4]*pool.Worker // where tried begins: there are seldom more
	spent    bool            // nobody is left: give what there is
	again    bool            // the proxy is to make another attempt
	held     heldAnswer
	failure  error                  // of the last attempt
	last     *reverseproxy.Upstream // the last one selected

	wait waiting // while all workers are full

	body *body.Replay  // until an answer is forwarded
	next followUp      // keeps it longer; nil if nothing follows
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

// attempt is one try on one worker.
type attempt struct {
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
	reasonPin      = "pin"
	reasonResponse = "response"
)

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

// begin begins to dispatch a request, and takes over the plan's body. The error is a
// refusal; the plan then keeps its body.
func (d *dispatcher) begin(r *http.Request, p *plan.Plan, start time.Time) (*route, error) {
	if refused := d.checkModel(p); refused != nil {
		return nil, refused
	}
	rt := &route{dispatcher: d, plan: p, start: start, ready: time.Now(), body: p.Body, cached: -1}
	rt.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if err := rt.narrow(r); err != nil {
		return nil, err
	}
	rt.countDropped(p)
	rt.noticeIneffective()
	d.pool.Spending.Request(rt.ready)
	d.followUps.Arrived(p)
	rt.tried = rt.usual[:0]
	p.Body = nil
	rt.extra, _ = r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	rt.repl.Map(rt.placeholder)
	if p.Fallback != "" {
		rt.fallBack(p.Fallback)
	}
	return rt, nil
}

// settle ends what the proxy has left open: it gives the client an answer that was held
// back, or returns the error that the client must get. err is what the proxy returned.
func (rt *route) settle(w http.ResponseWriter, r *http.Request, err error) error {
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
	rt.logger.Error("no worker answered", zap.String("pool", rt.pool.Name), zap.Error(rt.err))
	return rt.unserved(rt.err)
}

// fallBack takes in that the request is routed with less than full knowledge.
func (d *dispatcher) fallBack(reason string) {
	d.metrics.fallbacks.WithLabelValues(d.pool.Name, reason).Inc()
	d.pool.Incidents.Raise(time.Now(), "fallback "+reason, d.pool.Logger)
}

// request returns the request as the proxy gets it.
func (rt *route) request(r *http.Request) *http.Request {
	out := r.WithContext(context.WithValue(rt.startTrace(r.Context()), routeKey{}, rt))
	out.Header = rt.plan.WithoutRouting(r.Header)
	out.Trailer = nil // it could route, and engines read none
	if rt.body == nil {
		out.Body = rt.plan.Stream
		return out
	}
	out.Body, out.TransferEncoding = http.NoBody, nil
	if rt.body.Size > 0 || r.ContentLength < 0 {
		rt.lazy = &body.Lazy{Of: rt.body}
		out.Body = rt.lazy
	}
	if r.ContentLength < 0 {
		return out // it is sent in chunks, as it came
	}
	out.ContentLength = rt.body.Size
	if r.ContentLength != out.ContentLength && r.Header.Get("Content-Length") != "" {
		out.Header = maps.Clone(out.Header) // the server's own is shared
		out.Header.Set("Content-Length", strconv.FormatInt(out.ContentLength, 10))
	}
	return out
}

// selector is the proxy's selection policy. The choice itself is the route's.
type selector struct{}

// Select implements reverseproxy.Selector.
func (selector) Select(offered reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	rt, ok := r.Context().Value(routeKey{}).(*route)
	if !ok {
		return nil
	}
	return rt.choose(r.Context(), offered)
}

// choose selects the upstream of the next attempt and books it. It returns nil
// if the proxy is to ask again later.
func (rt *route) choose(ctx context.Context, offered reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	rt.endAttempt(false)
	rt.takeScratch()
	defer rt.returnScratch()
	rt.offered, rt.again, rt.answer = offered, false, nil
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
				return rt.nobody()
			}
		}
		if found {
			if up := rt.book(t); up != nil {
				return up
			}
			if rt.pool.Queue.Length.Load() == 0 {
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
func (rt *route) pause(ctx context.Context) bool {
	timer := time.NewTimer(max(rt.limits.interval, leastInterval))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// nobody returns the upstream of a request that has no worker left: the transport
// answers with the last failure. It is nil if the operator's retries make the proxy
// ask again.
func (rt *route) nobody() *reverseproxy.Upstream {
	switch {
	case rt.anotherRound():
		rt.attempts++
		rt.again = true
		return nil
	case rt.last != nil:
		rt.spent = true
		return rt.last
	}
	rt.spent = true
	return nowhere
}

// book lets the policy choose among the candidates, unless the session is
// bound to one, and books the choice. It returns nil if the worker filled up
// meanwhile, or a queued request has first claim to its room.
func (rt *route) book(t time.Time) *reverseproxy.Upstream {
	bound := rt.boundPosition()
	request := rt.score()
	i, lease := rt.pool.Scheduler.SelectAmong(t, request, rt.scratch.Targets, bound, rt.policy(), &rt.scratch.Sel)
	rt.noticeChoice(t)
	rt.noticeLeaving(bound, i)
	if !rt.takeSlot(rt.scratch.Workers[i]) {
		lease.End(false, nil)
		return nil
	}
	a := &attempt{
		Stream: pool.Stream{Worker: rt.scratch.Workers[i], Target: rt.scratch.Targets[i].Target, Begun: t, Work: rt.work()},
		lease:  lease, terms: rt.scratch.Sel.Candidates[i], slot: rt.plan.Computes, bound: bound >= 0,
	}
	a.reason = rt.reasonOf(bound, &a.terms)
	a.mark = a.Worker.Health.Admit()
	a.prompt = promptLength{rt.scratch.Sel.Tokens, rt.scratch.Sel.Known}
	a.Ahead = a.terms.PrefillTokens + a.prompt.tokens
	a.Worker.Flow.Begin(&a.Stream)
	if rt.plan.Computes {
		rt.pool.Yield(a.Worker) // what is computed beforehand must cost nobody anything
	}
	rt.attempts++
	rt.attempt, rt.last = a, rt.scratch.Upstreams[i]
	rt.tried = append(rt.tried, a.Worker)
	rt.show(a)
	rt.trace.selected(rt, a, t)
	if rt.shadow != nil && bound < 0 && rt.plan.Request != nil {
		rt.shadow.compare(rt, i)
	}
	return rt.last
}

// noticeLeaving records, after a choice, whether the session stays bound though the
// policy has sent this turn elsewhere: it does while its worker holds the prompt.
func (rt *route) noticeLeaving(bound, chosen int) {
	if bound < 0 && chosen != rt.scratch.Sel.Home && rt.scratch.Sel.HomeHolds() {
		rt.wait.away = true
	}
}

// noticeChoice logs what degraded the choice.
func (rt *route) noticeChoice(t time.Time) {
	if rt.scratch.Sel.Fault {
		rt.pool.Incidents.Raise(t, incidentFault, rt.pool.Logger)
	}
	if rt.scratch.Sel.Unknown > 0 {
		rt.pool.Incidents.Raise(t, incidentUnknown, rt.pool.Logger)
	}
}

// Conditions that last, as the log and the admin API say them.
const (
	incidentFault   = "policy that returns no candidate or changes their list, the least loaded worker is taken"
	incidentUnknown = "unknown load of some workers (the median of the others is assumed)"
)

// policy returns the policy that chooses for this request.
func (rt *route) policy() kvscore.Policy {
	if rt.plan.Request == nil {
		return &passThroughPolicy
	}
	return rt.active
}

// reasonOf returns why a candidate was chosen.
func (rt *route) reasonOf(bound int, c *kvscore.Candidate) string {
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
func (rt *route) candidates(offered reverseproxy.UpstreamPool, t time.Time) bool {
	if sec := t.Unix(); rt.pool.Used.Load() != sec {
		rt.pool.Used.Store(sec)
	}
	used, found := rt.gather(offered, t)
	switch {
	case rt.pinned(): // whatever it is at
	case used.Draining:
		rt.pool.Incidents.Raise(t, "no worker left but draining ones, which are used all the same", rt.pool.Logger)
	case used.Marked && len(rt.tried) == 0:
		rt.pool.Incidents.Raise(t, "all workers marked down, and used all the same", rt.pool.Logger)
	}
	return found
}

// workersOffered returns the workers behind the upstreams that the proxy has.
func (rt *route) workersOffered() []*pool.Worker {
	list := make([]*pool.Worker, 0, len(rt.offered))
	for _, row := range rt.table(rt.offered).Rows {
		list = append(list, row.Worker)
	}
	return list
}

// otherLeft tells whether a worker is available that was not tried.
func (rt *route) otherLeft() bool {
	want, rows := rt.wants(), rt.table(rt.offered).Rows
	for i, up := range rt.offered {
		if w := rows[i].Worker; up.Available() && !slices.Contains(rt.tried, w) && rt.pool.Fits(&want, rt.model, w) {
			return true
		}
	}
	return false
}

// boundPosition returns the position of the target that the choice is already made
// for: the request's pin, or the session's target unless the policy may leave it. It is
// -1 if there is none among the candidates.
func (rt *route) boundPosition() int {
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
func (rt *route) placeholder(key string) (any, bool) {
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
func (rt *route) shown() *attempt {
	if rt.answer != nil {
		return rt.answer.attempt
	}
	return rt.attempt
}

// show logs the choice.
func (rt *route) show(a *attempt) {
	if c := rt.logger.Check(zap.DebugLevel, ""); c != nil {
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
func (rt *route) costsTime(a *attempt) bool {
	return !a.bound && kvscore.CostUnit(rt.policy()) == kvscore.UnitMilliseconds
}

// endAttempt ends the attempt under way, if there is one. computed says that
// the worker has computed the prompt.
func (rt *route) endAttempt(computed bool) {
	a := rt.attempt
	if a == nil || a.over {
		return
	}
	a.over = true
	a.Worker.Health.Leave(a.mark)
	a.Worker.Flow.End(&a.Stream)
	var answer []uint64
	if computed && rt.answer != nil {
		answer = rt.answer.Blocks
	}
	a.lease.End(computed, answer)
	if a.slot {
		rt.pool.FreeSlot(a.Worker)
	}
}
