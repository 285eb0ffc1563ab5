package dispatch

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"go.uber.org/zap"

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
	rt, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && rt.retryWanted, nil
}

// AnotherMatcher stands at the head of each of the operator's retry_match: what
// is wanted there is done as long as another attempt can come to anything. An
// answer that matches and is the last one reaches the client.
type AnotherMatcher struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (AnotherMatcher) MatchWithError(r *http.Request) (bool, error) {
	rt, ok := r.Context().Value(routeKey{}).(*Dispatch)
	return ok && !rt.exhausted && r.Context().Err() == nil && rt.anotherTry(rt.suspects), nil
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

// noUpstream stands for the upstream when there is none. The transport answers
// for it, so that the proxy need not be told in another way to stop asking.
var noUpstream = &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: "localhost:0"}

var errNoWorker = errors.New("no worker is available")

// heldAnswer is an answer that goes to the client if no worker has a better.
type heldAnswer struct {
	resp    *http.Response
	attempt *Attempt
}

// repeatable tells whether the request can be made again, after it may have
// reached a worker.
func (rt *Dispatch) repeatable(reached bool) bool {
	if rt.plan.Stream != nil && rt.plan.Stream.Touched.Load() {
		return false
	}
	return !reached || rt.plan.Repeatable
}

// anotherRound tells whether the operator wants workers to be tried again that
// were tried.
func (rt *Dispatch) anotherRound() bool {
	return !rt.pinned() && rt.Limits.Set() && rt.Limits.allow(rt.start, rt.attempts)
}

// anotherTry tells whether a further attempt may find a worker, and the
// operator's limits allow it.
func (rt *Dispatch) anotherTry(suspects int) bool {
	return rt.anotherRound() || !rt.Limits.Set() && suspects < maxSuspects && rt.otherLeft()
}

// lastSuspect tells whether the attempt under way is the last one if it breaks.
func (rt *Dispatch) lastSuspect() bool {
	return !rt.Limits.Set() && rt.suspects+1 >= maxSuspects
}

// retry has the proxy make another attempt. It returns what the proxy sees of this one.
func (rt *Dispatch) retry(req *http.Request, resp *http.Response, v *verdict, err error) (*http.Response, error) {
	rt.countRetry(rt.attempt, v.reason)
	rt.retryWanted = true
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusNotFound {
		rt.Probes.AskAgain(rt.attempt.Worker) // its list of models is out of date
	}
	return rt.hold(req, resp), nil
}

// giveUp returns the answer that was held back, or else the last failure.
func (rt *Dispatch) giveUp() (*http.Response, error) {
	if err := rt.errWaiting(); err != nil {
		return nil, err
	}
	if resp := rt.takeHeld(); resp != nil {
		return resp, nil
	}
	if rt.failure == nil {
		rt.Pool.Incidents.Raise(time.Now(), rt.incidentNobody(), rt.Pool.Logger)
		return nil, caddyhttp.Error(http.StatusServiceUnavailable, errNoWorker)
	}
	return nil, lastError{rt.failure}
}

// deliver prepares an answer for the client.
func (rt *Dispatch) deliver(req *http.Request, resp *http.Response) *http.Response {
	a := rt.attempt
	rt.release()
	if rt.foresee(resp); !rt.KeepBody && rt.next == nil {
		rt.dropBody()
	}
	rt.label(resp.Header, a)
	if resp.StatusCode == http.StatusSwitchingProtocols {
		a.lease.Prefilled(time.Now())
		a.lease.Alive(time.Now().AddDate(100, 0, 0)) // it lives as long as the connection
		return resp
	}
	if resp.StatusCode < 300 {
		rt.commit()
	}
	if rt.plan.Lists && !response.MergeModels(resp, rt.Pool.ModelsBeside(a.Worker, rt.workersOffered())) {
		rt.FallBack(fallbackUnmerged)
	}
	rt.observe(req, resp)
	return resp
}

// hold keeps an answer back while another worker is asked, and returns what
// the proxy sees in its place.
func (rt *Dispatch) hold(req *http.Request, resp *http.Response) *http.Response {
	a := rt.attempt
	rt.endAttempt(false)
	rt.release()
	rt.held = heldAnswer{resp, a}
	shown := *resp
	shown.Header, shown.Body, shown.Request = maps.Clone(resp.Header), http.NoBody, req
	return &shown
}

// writeHeld gives the client the answer that was held back for a better one,
// where the proxy has ended without an answer. It tells whether there was one.
func (rt *Dispatch) writeHeld(w http.ResponseWriter) bool {
	resp := rt.takeHeld()
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
func (rt *Dispatch) takeHeld() *http.Response {
	h := rt.held
	if h.resp == nil {
		return nil
	}
	rt.held = heldAnswer{}
	rt.label(h.resp.Header, h.attempt)
	rt.answer = rt.deliveryOf(h.attempt, h.resp)
	return h.resp
}

// release lets go of an answer that was held back.
func (rt *Dispatch) release() {
	if rt.held.resp != nil {
		_ = rt.held.resp.Body.Close()
		rt.held = heldAnswer{}
	}
}

func (rt *Dispatch) countRetry(a *Attempt, reason string) {
	rt.Pool.CountRetries(a.Worker, reason, 1)
	rt.trace.retried(a, reason)
}

// markDown marks the worker of a failed attempt, with one log line when it was
// well before. wait is how long the worker asked to be left alone.
func (rt *Dispatch) markDown(a *Attempt, why string, wait time.Duration, busy bool) {
	if a.Worker.Health.Fail(time.Now(), a.Begun, wait, busy) {
		rt.Logger.Warn("worker is marked down", zap.String("pool", rt.Pool.Name),
			zap.String("upstream", a.Worker.Dial), zap.String("why", why))
	}
}

// erred takes in that a worker answered with an error that may be its own
// fault. Which it is shows in how the others do. own says that it is hardly the
// client's.
func (rt *Dispatch) erred(a *Attempt, status string, own bool) {
	t := time.Now()
	errs, share := a.Worker.Health.RecordError(t, own, rt.blameKey())
	if errs < pool.FewErrors {
		return
	}
	var others, theirs float64
	for _, w := range rt.workersOffered() {
		if w != a.Worker {
			n, e := w.Health.Lately()
			others, theirs = others+n, theirs+e
		}
	}
	if pool.Worse(errs, share, theirs/max(others, 1)) {
		rt.markDown(a, "most answers are errors, unlike those of the others: "+status, 0, false)
	}
}

// stays tells whether a request cannot be made on another worker: none is left,
// it has broken on one already, or the budget is spent.
func (rt *Dispatch) stays() bool {
	return !rt.otherLeft() || rt.lastSuspect() || rt.Pool.Spending.Spent(time.Now(), rt.Pool.Settings.Load().Retries)
}

// affordable tells whether the budget allows that an attempt is made again that
// ended with err, nil after an answer. A connection that could not be made is
// not charged: it has cost no worker anything. Nor is what was paid for when the
// worker was found to hang.
func (rt *Dispatch) affordable(a *Attempt, err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || a.Moved || rt.Pool.MayRetry(time.Now())
}
