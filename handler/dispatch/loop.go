package dispatch

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Selector is the proxy's selection policy. The choice itself is the dispatch's.
type Selector struct{}

// Select implements reverseproxy.Selector.
func (Selector) Select(ups reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if d := dispatchOf(r.Context()); d != nil {
		d.original = upstream.Original{Header: r.Header, Host: r.Host}
		return d.Select(r.Context(), ups)
	}
	return nil
}

// Select finds a seat for the first attempt, and returns its upstream; nil if there is none. Caddy's
// proxy then prepares the request for that worker, and calls RoundTrip.
func (d *Dispatch) Select(ctx context.Context, ups reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	d.see(ups)
	switch err := d.next(ctx, nil); {
	case err == nil:
		return d.attempt.Upstream
	case errors.Is(err, pool.ErrNoWorker):
		incident := pool.ErrNoWorker.Error()
		if d.fixed != nil {
			incident = "requests pin a worker that is not available"
		}
		d.Pool.Raise(time.Now(), incident)
	}
	return nil
}

// RoundTrip answers the proxy's request. The proxy has prepared it for the worker that Select
// returned.
func (d *Dispatch) RoundTrip(req *http.Request) (*http.Response, error) {
	d.proxied = req
	if d.plan.Everywhere && d.fixed == nil && len(d.offers.Ups) > 1 {
		return d.askAll(req)
	}
	resp, err := d.run(req.Context(), nil)
	switch {
	case err == nil:
		return d.deliver(req, resp), nil
	case req.Context().Err() != nil:
		return nil, err
	}
	return d.giveUp(err)
}

// run makes attempts until one gives an answer for the client. All attempts of a request are made
// here. The first one at the whole answer is made at the worker that Select has found. r is the rest of
// a stream, nil for the whole answer. The error is the last attempt's, or says why there is no other.
func (d *Dispatch) run(ctx context.Context, r *remainder) (*http.Response, error) {
	for selected := r == nil; ; selected = false {
		req := d.proxied
		if !selected {
			err := d.next(ctx, r)
			if err != nil {
				return nil, err
			}
			if req, err = d.Client.Redirect(req, d.original, d.attempt.Upstream); err != nil {
				return nil, &api.Refusal{Err: err} // not the worker's fault
			}
		}
		resp, resent, err := d.send(req)
		var v verdict
		if r == nil {
			v = d.judge(ctx, resp, resent, err)
		} else {
			v = r.judge(ctx, d.attempt, resp, err)
		}
		d.charge(&v, resp, err)
		if r == nil {
			d.matchRetry(&v, req, resp)
		}
		d.record(ctx, &v, resp, err)
		switch v.do {
		case deliver:
			return resp, nil
		case retry:
		case putOff:
			_ = resp.Body.Close()
			return nil, d.failure
		case fail:
			if resp != nil {
				_ = resp.Body.Close()
			}
			return nil, cmp.Or(err, pool.ErrNoWorker) // an answer is no rest of a stream
		}
	}
}

// charge charges a retry to the retry budget, unless it is free. If the budget is spent, no retry
// follows. A failed connection is free, because it costs no worker anything. The pool has already charged
// a move from a hung worker, and check one from a silent prefill worker.
func (d *Dispatch) charge(v *verdict, resp *http.Response, err error) {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	if v.do != retry || v.free || unconnected || d.attempt.Moved() || errors.Is(err, split.ErrPrefillGone) ||
		d.Pool.Budget.Charge(time.Now()) {
		return
	}
	if v.do = fail; resp != nil && !v.withheld {
		v.do = deliver
	}
}

// matchRetry retries what would be the last attempt, if the operator's lb_retry_match wants that. The
// retry budget does not count.
func (d *Dispatch) matchRetry(v *verdict, req *http.Request, resp *http.Response) {
	if v.do != retry && len(d.RetryMatch) > 0 && req.Context().Err() == nil && d.mayRetry(false, false) &&
		matches(d.RetryMatch, d.repl, req, resp) {
		v.do, v.reason = retry, "retry_match"
	}
}

// record records what an attempt has shown. If its answer is not the client's, the attempt ends. If another one
// follows, its answer is held back.
func (d *Dispatch) record(ctx context.Context, v *verdict, resp *http.Response, err error) {
	a := d.attempt
	if v.misfit != fits {
		d.refused(v.misfit)
	}
	if v.do == deliver && (v.misfit != fits || attempt.Retryable(resp.StatusCode)) && d.putsOff() {
		v.do = putOff
	}
	if v.do != deliver {
		a.Prefilled(time.Now()) // what it has not computed is no recent work
		d.endAttempt(false)
	}
	d.Pool.Report(a.Worker, v.outcome)
	if v.suspect {
		d.suspects++
	}
	if err != nil && ctx.Err() == nil {
		d.failure = err
	}
	switch {
	case v.do == deliver:
		return
	case v.phases != nil:
		a.CountOutcome("", false) // its worker is well
	case v.do == retry && errors.Is(err, attempt.ErrDrained):
		a.CountOutcome(observe.AttemptDrained, false)
	case v.do == putOff, v.do == retry && v.misfit != fits:
		a.CountOutcome(observe.AttemptDeclined, false)
	case v.do == retry:
		a.CountOutcome(observe.AttemptRetried, !v.blameless)
	}
	if v.do != retry {
		return
	}
	switch {
	case v.phases != nil:
		d.retryPhases(v.phases)
	case v.reason != "":
		a.CountRetry(v.reason)
	}
	if v.misfit == lacksModel {
		d.Prober.AskAgain(a.Worker) // what is known of it is out of date
	}
	switch {
	case v.withheld:
		_ = resp.Body.Close()
	case resp != nil && d.answer == nil:
		d.held.drop()
		d.held = heldAnswer{resp: resp, attempt: a}
	}
}

// retryPhases prepares another attempt after a pair of workers failed. The decode worker has not failed.
func (d *Dispatch) retryPhases(failed *split.Error) {
	a := d.attempt
	by := a.Computes()
	by.CountRetry(failed.Reason)
	if c := d.Logger.Check(zap.DebugLevel, "phases failed"); c != nil {
		c.Write(zap.String("prefill", by.Worker.Dial), zap.String("decode", a.Worker.Dial), zap.Error(failed))
	}
	if n := len(d.tried); n > 0 && d.tried[n-1] == a.Worker {
		d.tried = d.tried[:n-1]
	}
	d.split.Failed(d.phases, failed)
}

// next finds a seat for the next attempt. If the operator's limits allow it, the tried workers get
// another round, and another.
func (d *Dispatch) next(ctx context.Context, r *remainder) error {
	d.turn.NextAttempt()
	if r != nil {
		return r.seat(ctx)
	}
	err := d.seat(ctx)
	for first := true; errors.Is(err, pool.ErrNoWorker) && d.fixed == nil && d.Limits.Set() && d.Limits.allow(d.start, d.attempts); first = false {
		d.turn.Yield()
		if !pool.Sleep(ctx, max(d.Limits.Interval, 10*time.Millisecond)) {
			break
		}
		if !first {
			d.attempts++ // the round before, which found no worker
		}
		d.tried = d.tried[:0]
		d.split.Again()
		if source := d.Proxy.DynamicUpstreams; source != nil { // past its cache, as Caddy's proxy does after a failure
			if cache, ok := source.(reverseproxy.CachingUpstreamSource); ok {
				_ = cache.ResetCache(d.plan.HTTP) // if it fails, the cached ones are as good
			}
			d.see(d.upstreams(d.plan.HTTP))
		}
		err = d.seat(ctx)
	}
	if err == nil {
		return nil
	}
	if left := ctx.Err(); left != nil {
		d.wait.left = left
		return left
	}
	if !errors.Is(err, pool.ErrNoWorker) && (d.held.resp == nil || d.putsOff()) {
		d.turnAway(err)
	}
	return err
}

// giveUp gives the client the held answer, or else the error for it. err says why no other attempt
// follows.
func (d *Dispatch) giveUp(err error) (*http.Response, error) {
	h := d.held
	switch {
	case d.wait.turnedAway != nil:
		return nil, d.wait.turnedAway
	case h.resp != nil && !d.putsOff():
		d.held = heldAnswer{}
		h.attempt.Label(h.resp.Header, d.start, d.wait.waited)
		d.answer = d.deliveryOf(h.attempt, h.resp)
		return h.resp, nil
	case d.failure != nil:
		return nil, d.failure
	}
	return nil, err
}

// matches returns whether the operator's lb_retry_match has an attempt retried. As in Caddy's proxy,
// only matchers that read an answer decide about one. The last answer reaches the client.
func matches(sets caddyhttp.MatcherSets, repl *caddy.Replacer, req *http.Request, resp *http.Response) bool {
	const prefix = "http.reverse_proxy."
	if resp == nil {
		repl.Set(prefix+"is_transport_error", true)
		defer repl.Delete(prefix + "is_transport_error")
	} else {
		repl.DeleteByPrefix(prefix + "header.")
		for field, values := range resp.Header {
			repl.Set(prefix+"header."+field, strings.Join(values, ","))
		}
		repl.Set(prefix+"status_code", resp.StatusCode)
		repl.Set(prefix+"status_text", resp.Status)
	}
	return slices.ContainsFunc(sets, func(set caddyhttp.MatcherSet) bool {
		if resp != nil && !readsAnswers(set) {
			return false
		}
		matched, fault := set.MatchWithError(req)
		return matched && fault == nil
	})
}

// readsAnswers returns whether a set of matchers has an expression that reads the answer, or may.
func readsAnswers(set caddyhttp.MatcherSet) bool {
	return slices.ContainsFunc(set, func(m any) bool {
		e, ok := m.(*caddyhttp.MatchExpression)
		return ok && slices.ContainsFunc(e.Placeholders(), func(name string) bool {
			name, ours := strings.CutPrefix(name, "http.reverse_proxy.")
			return name == "" || ours && (strings.HasPrefix(name, "status_") || strings.HasPrefix(name, "header.") ||
				strings.HasPrefix(name, "upstream.latency"))
		})
	})
}

// send sends the request to the attempt's worker. resent: net/http sent it twice.
func (d *Dispatch) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	a := d.attempt
	if err = d.turn.Open(req, a.Worker, a.Target); err != nil {
		return nil, false, err
	}
	if a.Terms.Split {
		phases, whole, err := d.split.Begin(d, a, req)
		if !whole {
			d.phases = phases
		}
		if errors.Is(err, pool.ErrQueueFull) || errors.Is(err, pool.ErrWaited) {
			d.turnAway(err)
			err = d.wait.turnedAway
		}
		if err != nil {
			return nil, false, err
		}
	}
	if a.Answers != nil {
		a.Waits(false)
		return d.phases.Answer(req), false, nil
	}
	d.Session, d.AskIDs = d.turn.EngineSession(), d.exact && (d.Rest == nil && d.Body != nil && d.mayGoOn() || d.cutIDs)
	b := d.bounds()
	resp, resent, err = a.Header(req, &b)
	d.noticeDone()
	if d.phases != nil {
		d.phases.Sent(d.Sent)
		if err == nil && !a.Streams(resp) {
			d.phases.Arrived(resp.StatusCode)
		}
	}
	return resp, resent, err
}

// bounds returns what may end the attempt early.
func (d *Dispatch) bounds() (b attempt.Bounds) {
	a := d.attempt
	if t := d.Timeouts; a.Kind == worker.KindStream {
		b.First, b.Idle = time.Duration(t.FirstToken), time.Duration(t.StreamIdle)
	}
	unsafe := d.phases.CancelUnsafe()
	// It asks before the attempt ends, and cannot know whether another worker will be free then.
	b.Movable = d.plan.Request != nil && d.fixed == nil && len(d.offers.Ups) > 1 && !unsafe && !d.lastSuspect() &&
		d.Limits.allow(d.start, d.attempts)
	b.Moves = d.Body != nil && d.mayGoOn() && (d.answer == nil || d.answer.moved+1 < d.Resume.Tries) && !unsafe
	b.Ends = a.Kind == worker.KindStream && len(d.offers.Ups) > 1
	if d.phases != nil {
		d.phases.Bound(&b)
	}
	return b
}

// noticeDone records what was done to the body of the last attempt for its engine.
func (d *Dispatch) noticeDone() {
	d.cutIDs = d.cutIDs || d.CutIDs
	cut := d.Cut &^ (d.cut | d.plan.Dropped) // counted once per request
	d.cut |= cut
	d.CountDropped(cut, nil)
	if d.Unsupported == 0 || !d.plan.TakesSlot {
		return
	}
	for name := range d.Unsupported.Names {
		unsupportedTotal.WithLabelValues(d.Pool.Name, cmp.Or(d.Engine, engine.Other), name).Inc()
	}
	d.Pool.Raise(time.Now(), "clients request nvext fields that the engine does not support")
}

// SeatPrefill implements split.Owner.
func (d *Dispatch) SeatPrefill(ctx context.Context, want *pool.Wants, by pool.Chooser, p *attempt.Attempt) error {
	offers := d.offers
	if err := d.reserve(ctx, want, &offers, by, p); err != nil {
		return err
	}
	p.Chosen(d.reasonOf(false, &p.Terms), d.attempts, kvscore.CostUnit(d.policy))
	return nil
}

// Prefilled implements split.Owner.
func (d *Dispatch) Prefilled(p *attempt.Attempt, c response.Counts) {
	if !d.Holds() {
		kind := worker.ReportKind{API: d.plan.API.Name()}
		learnPrompt(p, &response.Summary{Counts: c}, p.Worker.CachedTokens(kind, c.Cached))
	}
}

// ChargeRetry implements split.Owner.
func (d *Dispatch) ChargeRetry() bool {
	return d.Limits.allow(d.start, d.attempts) && d.Pool.Budget.Charge(time.Now())
}
