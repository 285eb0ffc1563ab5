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

// Limits are the operator's lb_try_duration, lb_try_interval and lb_retries. Without a
// duration or retries, each worker is tried once.
type Limits struct {
	Duration, Interval time.Duration
	Retries            int
}

// Set returns whether the operator has set limits.
func (l Limits) Set() bool { return l.Duration > 0 || l.Retries > 0 }

// allow returns whether the proxy would make another attempt.
func (l Limits) allow(start time.Time, attempts int) bool {
	return (l.Duration == 0 || time.Since(start) < l.Duration) && (l.Retries == 0 || attempts <= l.Retries)
}

// maxSuspects bounds the failed attempts that may have reached an engine: the request itself
// may end engines.
const maxSuspects = 2

// retryMatcher tells the proxy whether to retry. It stands before the operator's own
// retry_match.
type retryMatcher struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (retryMatcher) MatchWithError(r *http.Request) (bool, error) {
	d, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && d.retryWanted, nil
}

// AnotherMatcher heads each of the operator's retry_match: a match is retried only while
// another attempt can come to anything. The last answer reaches the client.
type AnotherMatcher struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (AnotherMatcher) MatchWithError(r *http.Request) (bool, error) {
	d, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && !d.exhausted && r.Context().Err() == nil && d.anotherTry(d.suspects), nil
}

// RetryMatchers makes the proxy ask retryMatcher about failures and answers. It asks about
// answers only where an expression reads them.
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
	attempt *attempt
}

// repeatable returns whether the request can be made again. reached: it may have reached a
// worker.
func (d *Dispatch) repeatable(reached bool) bool {
	if d.plan.Stream != nil && d.plan.Stream.Touched.Load() {
		return false
	}
	return !reached || d.plan.Repeatable
}

// anotherRound returns whether the operator wants tried workers to be tried again.
func (d *Dispatch) anotherRound() bool {
	return !d.pinned() && d.Limits.Set() && d.Limits.allow(d.start, d.attempts)
}

// anotherTry returns whether a further attempt may find a worker within the operator's limits.
func (d *Dispatch) anotherTry(suspects int) bool {
	return d.anotherRound() || !d.Limits.Set() && suspects < maxSuspects && d.otherLeft()
}

// lastSuspect returns whether no attempt may follow if the present one breaks.
func (d *Dispatch) lastSuspect() bool {
	return !d.Limits.Set() && d.suspects+1 >= maxSuspects
}

// retry makes the proxy try again, and returns what the proxy sees of this attempt.
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

// giveUp returns the held answer, or else the last failure.
func (d *Dispatch) giveUp() (*http.Response, error) {
	if d.wait.left != nil {
		return nil, d.wait.left
	}
	if d.wait.turnedAway != nil && d.held.resp == nil {
		return nil, lastError{d.wait.turnedAway}
	}
	if resp := d.takeHeld(); resp != nil {
		return resp, nil
	}
	if d.failure == nil {
		incident := errNoWorker.Error()
		if d.pinned() {
			incident = "a worker that requests name is not available"
		}
		d.Pool.Incidents.Raise(time.Now(), incident, d.Pool.Logger)
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
		if conn, ok := resp.Body.(io.ReadWriteCloser); ok {
			resp.Body = &tunnel{conn, a.lease}
		}
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

// hold keeps an answer back while another worker is asked, and returns what the proxy sees
// instead.
func (d *Dispatch) hold(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.endAttempt(false)
	d.release()
	d.held = heldAnswer{resp, a}
	shown := *resp
	shown.Header, shown.Body, shown.Request = maps.Clone(resp.Header), http.NoBody, req
	return &shown
}

// writeHeld gives the client the held answer if the proxy has ended without one. It returns
// whether there was one.
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

// takeHeld makes the held answer the client's and returns it; nil if there is none.
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

// release drops the held answer.
func (d *Dispatch) release() {
	if d.held.resp != nil {
		_ = d.held.resp.Body.Close()
		d.held = heldAnswer{}
	}
}

func (d *Dispatch) countRetry(a *attempt, reason string) {
	d.Pool.CountRetries(a.Worker, reason, 1)
	d.trace.retried(a, reason)
}

// stays returns whether no other worker is left, the request broke on one already, or the
// retry budget is spent.
func (d *Dispatch) stays() bool {
	return !d.otherLeft() || d.lastSuspect() || d.Pool.Spending.Spent(time.Now(), d.Pool.Settings.Load().Retries)
}

// affordable returns whether the retry budget allows another attempt after err. Failed
// connections cost no worker anything; moves from a hung worker are paid for already.
func (d *Dispatch) affordable(a *attempt, err error) bool {
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

// lastError keeps the proxy from another attempt, even after a dial error: it has no Unwrap.
type lastError struct{ error }

// Timeout lets the proxy answer with 504 where it would have.
func (e lastError) Timeout() bool {
	t, ok := e.error.(interface{ Timeout() bool }) //nolint:errorlint // as the proxy does
	return ok && t.Timeout()
}

// Temporary completes net.Error.
func (lastError) Temporary() bool { return false }
