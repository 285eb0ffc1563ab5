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
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"

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
		if d.pinned() {
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
	if d.plan.Everywhere && !d.pinned() && len(d.offers.Ups) > 1 {
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
			var err error
			if req, err = d.again(ctx, r); err != nil {
				return nil, err
			}
		}
		a := d.attempt
		resp, resent, err := d.send(req)
		var v verdict
		if r == nil {
			v = d.decide(req, resp, resent, err)
		} else {
			v = r.judge(ctx, a, resp, err)
		}
		d.record(ctx, &v, resp, err)
		switch v.do {
		case deliver:
			return resp, nil
		case retry:
			d.retried(&v, resp, err)
		case putOff:
			a.End(observe.AttemptDeclined, false)
			_ = resp.Body.Close()
			return nil, d.failure
		case fail, abandon:
			if resp != nil {
				_ = resp.Body.Close()
			}
			return nil, cmp.Or(err, pool.ErrNoWorker) // an answer is no rest of a stream
		}
	}
}

// decide decides what follows from an attempt at the whole answer. It may read the beginning of
// resp.Body, and puts it back.
func (d *Dispatch) decide(req *http.Request, resp *http.Response, resent bool, err error) verdict {
	v := d.judge(req.Context(), resp, resent, err)
	// After a refusal of the model or the length, the engine has computed nothing. One without the path may
	// have read a long upload.
	free := v.blameless || v.misfit == lacksModel || v.misfit == tooLong
	if v.do == retry && !free && !d.affordable(err) {
		v.do = fail
		if resp != nil && !v.withheld {
			v.do = deliver
		}
	}
	if (v.do == deliver || v.do == fail) && d.matches(req, resp) {
		v.do, v.reason = retry, "retry_match"
	}
	return v
}

// record records what an attempt has shown. If its answer is not the client's, it ends.
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
		if v.phases != nil {
			a.Uncounted() // its worker is well
		}
	}
	d.Pool.Report(a.Worker, v.outcome)
	if v.suspect {
		d.suspects++
	}
	if err != nil && ctx.Err() == nil {
		d.failure = err
	}
}

// retried counts an attempt that another one follows, and holds its answer back.
func (d *Dispatch) retried(v *verdict, resp *http.Response, err error) {
	a := d.attempt
	switch {
	case v.phases != nil:
		d.retryPhases(v.phases)
	case errors.Is(err, attempt.ErrDrained):
		a.End(observe.AttemptDrained, false)
	case v.misfit != fits:
		a.End(observe.AttemptDeclined, false)
	default:
		a.End(observe.AttemptRetried, !v.blameless)
	}
	if v.phases == nil && v.reason != "" {
		a.CountRetry(v.reason)
	}
	if v.misfit == lacksModel {
		d.Probes.AskAgain(a.Worker) // what is known of it is out of date
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

// again finds a seat for another attempt, and returns the request as the proxy would have made it
// for that worker.
func (d *Dispatch) again(ctx context.Context, r *remainder) (*http.Request, error) {
	err := d.next(ctx, r)
	if err != nil {
		return nil, err
	}
	req, err := d.Client.Redirect(d.proxied, d.original, d.attempt.Upstream)
	if err != nil {
		return nil, &api.Refusal{Err: err} // not the worker's fault
	}
	return req, nil
}

// next finds a seat for the next attempt. If the operator's limits allow it, the tried workers get
// another round, and another.
func (d *Dispatch) next(ctx context.Context, r *remainder) error {
	d.turn.NextAttempt()
	if r != nil {
		return r.seat(ctx, d)
	}
	err := d.seat(ctx)
	for first := true; errors.Is(err, pool.ErrNoWorker) && d.anotherRound() && d.pause(ctx); first = false {
		if !first {
			d.attempts++ // the round before, which found no worker
		}
		d.tried = d.tried[:0]
		d.split.Again()
		d.lookAgain()
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
		d.label(h.attempt, h.resp)
		d.answer = d.deliveryOf(h.attempt, h.resp)
		return h.resp, nil
	case d.failure != nil:
		return nil, d.failure
	}
	return nil, err
}

// matches returns whether the operator's lb_retry_match has an attempt retried. As in Caddy's proxy,
// only matchers that read an answer decide about one. The last answer reaches the client.
func (d *Dispatch) matches(req *http.Request, resp *http.Response) bool {
	if len(d.RetryMatch) == 0 || req.Context().Err() != nil || !d.anotherTry(d.suspects) ||
		d.plan.Once != nil && d.plan.Once.Touched.Load() {
		return false
	}
	const prefix = "http.reverse_proxy."
	if resp == nil {
		d.repl.Set(prefix+"is_transport_error", true)
		defer d.repl.Delete(prefix + "is_transport_error")
	} else {
		d.repl.DeleteByPrefix(prefix + "header.")
		for field, values := range resp.Header {
			d.repl.Set(prefix+"header."+field, strings.Join(values, ","))
		}
		d.repl.Set(prefix+"status_code", resp.StatusCode)
		d.repl.Set(prefix+"status_text", resp.Status)
	}
	return slices.ContainsFunc(d.RetryMatch, func(set caddyhttp.MatcherSet) bool {
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
