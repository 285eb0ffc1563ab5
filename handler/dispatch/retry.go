package dispatch

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/response"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Limits are how long and how often the operator lets a request be tried, as
// the proxy's lb_try_duration, lb_try_interval and lb_retries say it. Where
// neither duration nor retries are set, each worker is tried once.
type Limits struct {
	Duration, Interval time.Duration
	Retries            int
}

func (l Limits) Set() bool { return l.Duration > 0 || l.Retries > 0 }

// leastInterval is the least time between two rounds over the workers, whatever
// is configured: a request may not take a core for itself.
const leastInterval = 10 * time.Millisecond

// maxSuspects is how many attempts a request may have that may have reached an
// engine's computing and came to nothing. It may be the request that ends the
// engines: then it must not go through the whole pool.
const maxSuspects = 2

// allow tells whether the proxy would make another attempt.
func (l Limits) allow(start time.Time, attempts int) bool {
	return (l.Duration == 0 || time.Since(start) < l.Duration) &&
		(l.Retries == 0 || attempts <= l.Retries)
}

// retryMatcher tells the proxy what this package has decided: it stands before
// the operator's own retry_match.
type retryMatcher struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (retryMatcher) MatchWithError(r *http.Request) (bool, error) {
	d, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && d.retryWanted, nil
}

// AnotherMatcher stands at the head of each of the operator's retry_match: what
// is wanted there is done as long as another attempt can come to anything. An
// answer that matches and is the last one reaches the client.
type AnotherMatcher struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (AnotherMatcher) MatchWithError(r *http.Request) (bool, error) {
	d, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && !d.exhausted && r.Context().Err() == nil && d.anotherTry(d.suspects), nil
}

// RetryMatchers returns what makes the proxy ask retryMatcher, about failures
// and about answers. It asks about an answer only where an expression reads
// something of it.
func RetryMatchers(ctx caddy.Context) (caddyhttp.MatcherSets, error) {
	always := &caddyhttp.MatchExpression{Expr: "{http.reverse_proxy.status_code} > 0"}
	if err := always.Provision(ctx); err != nil {
		return nil, fmt.Errorf("provisioning retries: %w", err)
	}
	return caddyhttp.MatcherSets{
		caddyhttp.MatcherSet{retryMatcher{}},
		caddyhttp.MatcherSet{retryMatcher{}, always},
	}, nil
}

var errNoWorker = errors.New("no worker is available")

// heldAnswer is an answer that goes to the client if no worker has a better.
type heldAnswer struct {
	resp    *http.Response
	attempt *Attempt
}

// repeatable tells whether the request can be made again, after it may have
// reached a worker.
func (d *Dispatch) repeatable(reached bool) bool {
	if d.plan.Stream != nil && d.plan.Stream.Touched.Load() {
		return false
	}
	return !reached || d.plan.Repeatable
}

// anotherRound tells whether the operator wants workers to be tried again that
// were tried.
func (d *Dispatch) anotherRound() bool {
	return !d.pinned() && d.Limits.Set() && d.Limits.allow(d.start, d.attempts)
}

// anotherTry tells whether a further attempt may find a worker, and the
// operator's limits allow it.
func (d *Dispatch) anotherTry(suspects int) bool {
	return d.anotherRound() || !d.Limits.Set() && suspects < maxSuspects && d.otherLeft()
}

// lastSuspect tells whether the attempt under way is the last one if it breaks.
func (d *Dispatch) lastSuspect() bool {
	return !d.Limits.Set() && d.suspects+1 >= maxSuspects
}

// retry has the proxy make another attempt. It returns what the proxy sees of this one.
func (d *Dispatch) retry(req *http.Request, resp *http.Response, v *verdict, err error) (*http.Response, error) {
	d.countRetry(d.attempt, v.reason)
	d.retryWanted = true
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusNotFound {
		d.Probes.AskAgain(d.attempt.Worker) // its list of models is out of date
	}
	return d.hold(req, resp), nil
}

// giveUp returns the answer that was held back, or else the last failure.
func (d *Dispatch) giveUp() (*http.Response, error) {
	if err := d.errWaiting(); err != nil {
		return nil, err
	}
	if resp := d.takeHeld(); resp != nil {
		return resp, nil
	}
	if d.failure == nil {
		d.Pool.Incidents.Raise(time.Now(), d.incidentNobody(), d.Pool.Logger)
		return nil, caddyhttp.Error(http.StatusServiceUnavailable, errNoWorker)
	}
	return nil, lastError{d.failure}
}

// deliver prepares an answer for the client.
func (d *Dispatch) deliver(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.release()
	if d.foresee(resp); !d.KeepBody && d.next == nil {
		d.dropBody()
	}
	d.label(resp.Header, a)
	if resp.StatusCode == http.StatusSwitchingProtocols {
		a.lease.Prefilled(time.Now())
		a.lease.Alive(time.Now().AddDate(100, 0, 0)) // it lives as long as the connection
		return resp
	}
	if resp.StatusCode < 300 {
		d.commit()
	}
	if d.plan.Lists && !response.MergeModels(resp, d.Pool.ModelsBeside(a.Worker, d.workersOffered())) {
		d.FallBack(fallbackUnmerged)
	}
	d.observe(req, resp)
	return resp
}

// hold keeps an answer back while another worker is asked, and returns what
// the proxy sees in its place.
func (d *Dispatch) hold(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.endAttempt(false)
	d.release()
	d.held = heldAnswer{resp, a}
	shown := *resp
	shown.Header, shown.Body, shown.Request = maps.Clone(resp.Header), http.NoBody, req
	return &shown
}

// writeHeld gives the client the answer that was held back for a better one,
// where the proxy has ended without an answer. It tells whether there was one.
func (d *Dispatch) writeHeld(w http.ResponseWriter) bool {
	resp := d.takeHeld()
	if resp == nil {
		return false
	}
	defer resp.Body.Close()
	response.Forward(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
	return true
}

// takeHeld makes the answer that was held back the client's, and returns it; nil
// if there is none.
func (d *Dispatch) takeHeld() *http.Response {
	h := d.held
	if h.resp == nil {
		return nil
	}
	d.held = heldAnswer{}
	d.label(h.resp.Header, h.attempt)
	d.answer = d.deliveryOf(h.attempt, h.resp)
	return h.resp
}

// release lets go of an answer that was held back.
func (d *Dispatch) release() {
	if d.held.resp != nil {
		_ = d.held.resp.Body.Close()
		d.held = heldAnswer{}
	}
}

func (d *Dispatch) countRetry(a *Attempt, reason string) {
	d.Pool.CountRetries(a.Worker, reason, 1)
	d.trace.retried(a, reason)
}

// stays tells whether a request cannot be made on another worker: none is left,
// it has broken on one already, or the budget is spent.
func (d *Dispatch) stays() bool {
	return !d.otherLeft() || d.lastSuspect() || d.Pool.Spending.Spent(time.Now(), d.Pool.Settings.Load().Retries)
}

// affordable tells whether the budget allows that an attempt is made again that
// ended with err, nil after an answer. A connection that could not be made is
// not charged: it has cost no worker anything. Nor is what was paid for when the
// worker was found to hang.
func (d *Dispatch) affordable(a *Attempt, err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || a.Moved || d.Pool.MayRetry(time.Now())
}

// unserved returns the error of a request that no worker has answered.
func (d *Dispatch) unserved(err error) *api.Refusal {
	e := &api.Refusal{API: d.plan.API, Status: http.StatusBadGateway, Code: api.CodeFailed}
	var refused reverseproxy.DialError
	var own *api.Refusal
	var he caddyhttp.HandlerError
	switch {
	case errors.As(err, &own):
		return own
	case d.plan.Stream != nil && d.plan.Stream.Failed.Load():
		return plan.Unreadable(d.plan.API, err)
	case d.failure == nil || errors.As(d.failure, &refused) && d.suspects < maxSuspects:
		e.Status, e.Code = http.StatusServiceUnavailable, api.CodeNoWorker
		e.Err = d.errNobody()
	case errors.As(err, &he) && he.StatusCode == http.StatusGatewayTimeout:
		e.Status, e.Code = he.StatusCode, api.CodeTimeout
		e.Err = errors.New("the worker did not answer in time")
	default:
		e.Err = errors.New("the worker failed before it answered")
	}
	return e
}

// lastError tells Caddy's proxy not to make another attempt, even if the
// error in it is a dial error: it has no Unwrap.
type lastError struct{ error }

// Timeout lets the proxy answer with 504 where it would have.
func (e lastError) Timeout() bool {
	t, ok := e.error.(interface{ Timeout() bool }) //nolint:errorlint // as the proxy does
	return ok && t.Timeout()
}

// Temporary completes net.Error.
func (lastError) Temporary() bool { return false }
