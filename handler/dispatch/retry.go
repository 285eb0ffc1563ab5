package dispatch

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// A retry takes these steps:
//
//  1. RoundTrip: judge decides on it, and askForRetry sets retryWanted.
//  2. RoundTrip returns the error, or what hold returns: hold keeps the answer itself.
//  3. The proxy asks its retry matchers, and retryMatcher returns retryWanted.
//  4. The proxy's loop calls Select, which clears retryWanted and selects an untried worker.
//  5. If none is left, exhaust has the proxy call RoundTrip, and giveUp returns the held
//     answer or the last failure.

// retryMatcher decides whether the proxy retries. It precedes the operator's own retry_match.
type retryMatcher struct{}

func (retryMatcher) MatchWithError(r *http.Request) (bool, error) {
	d := dispatchOf(r.Context())
	return d != nil && d.retryWanted, nil
}

// AnotherMatcher heads each of the operator's retry_match. A match is retried only while
// another attempt can succeed. The last answer reaches the client.
type AnotherMatcher struct{}

func (AnotherMatcher) MatchWithError(r *http.Request) (bool, error) {
	d := dispatchOf(r.Context())
	return d != nil && !d.exhausted && r.Context().Err() == nil && d.anotherTry(d.suspects), nil
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

// askForRetry makes the proxy try again, and returns what the proxy sees of this attempt.
func (a *attempt) askForRetry(req *http.Request, resp *http.Response, v *verdict, err error) (*http.Response, error) {
	d := a.d
	d.retryWanted = true
	if v.legs != nil {
		return a.askForLegs(req, resp, v.legs), nil
	}
	a.countRetry(v.reason)
	if errors.Is(err, errDrained) {
		a.end(pool.AttemptDrained, false)
	} else {
		a.end(pool.AttemptRetried, v.misfit == fits)
	}
	if err != nil {
		return nil, err
	}
	if v.misfit == lacksModel {
		d.Probes.AskAgain(a.Worker) // what is known of it is out of date
	}
	return a.hold(req, resp), nil
}

// countRetry counts a retry after an attempt.
func (a *attempt) countRetry(reason string) {
	a.d.Pool.CountRetries(a.Worker, reason, 1)
	a.d.trace.retried(a, reason)
}

// affordable returns whether the retry budget allows another attempt after err. A failed
// connection is free, because it costs no worker anything. The pool has already charged a move
// from a hung worker, and check one from a silent prefill worker.
func (a *attempt) affordable(err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || a.Moved() || errors.Is(err, errPrefillGone) || a.d.Pool.MayRetry(time.Now())
}

var errNoWorker = errors.New("no worker is available")

// giveUp returns the held answer, or else the last failure.
func (d *Dispatch) giveUp() (*http.Response, error) {
	if d.wait.left != nil {
		return nil, d.wait.left
	}
	if d.wait.turnedAway != nil {
		return nil, lastError{d.wait.turnedAway}
	}
	if resp := d.takeHeld(); resp != nil {
		return resp, nil
	}
	if d.failure == nil {
		incident := errNoWorker.Error()
		if d.pinned() {
			incident = "requests pin a worker that is not available"
		}
		d.Pool.Incidents.Raise(time.Now(), incident, d.Pool.Logger)
		return nil, caddyhttp.Error(http.StatusServiceUnavailable, errNoWorker)
	}
	return nil, lastError{d.failure}
}

// unserved returns the error of a request that no worker has answered.
func (d *Dispatch) unserved(err error) *api.Refusal {
	e := &api.Refusal{API: d.plan.API, Status: http.StatusBadGateway, Code: api.CodeFailed}
	var refused reverseproxy.DialError
	var own *api.Refusal
	var he caddyhttp.HandlerError
	switch {
	case errors.As(err, &own) || errors.As(d.failure, &own):
		return own
	case d.plan.Once != nil && d.plan.Once.Failed.Load():
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

// Timeout returns what the error itself says. The proxy answers a timeout with 504.
func (e lastError) Timeout() bool {
	t, ok := e.error.(interface{ Timeout() bool }) //nolint:errorlint // as the proxy does
	return ok && t.Timeout()
}

func (lastError) Temporary() bool { return false }
