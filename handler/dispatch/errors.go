package dispatch

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// unserved returns the error of a request that no worker has answered.
func (rt *Dispatch) unserved(err error) *api.Refusal {
	e := &api.Refusal{API: rt.plan.API, Status: http.StatusBadGateway, Code: api.CodeFailed}
	var refused reverseproxy.DialError
	var own *api.Refusal
	var he caddyhttp.HandlerError
	switch {
	case errors.As(err, &own):
		return own
	case rt.plan.Stream != nil && rt.plan.Stream.Failed.Load():
		return plan.Unreadable(rt.plan.API, err)
	case rt.failure == nil || errors.As(rt.failure, &refused) && rt.suspects < maxSuspects:
		e.Status, e.Code = http.StatusServiceUnavailable, api.CodeNoWorker
		e.Err = rt.errNobody()
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

// statusOverloaded is what Dynamo's and Anthropic's servers answer when busy.
const statusOverloaded = 529

// retryable tells whether a status says that the worker did not take the
// request, so that another one may.
func retryable(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == statusOverloaded
}

// longestRetryAfter is how long a worker may ask to be left alone, to be
// believed.
const longestRetryAfter = time.Hour

// retryAfter returns how long a Retry-After header says to wait, in seconds or
// until a date (RFC 9110, 10.2.3), 0 if it does not. A date is compared with
// the worker's own clock, as far as its answer says what that shows.
func retryAfter(h http.Header, now time.Time) time.Duration {
	value := h.Get("Retry-After")
	if value == "" {
		return 0
	}
	var wait time.Duration
	if s, err := strconv.Atoi(value); err == nil {
		wait = time.Duration(min(max(s, -1), 2*int(longestRetryAfter/time.Second))) * time.Second
	} else if until, err := http.ParseTime(value); err == nil {
		if theirs, err := http.ParseTime(h.Get("Date")); err == nil {
			now = theirs
		}
		wait = until.Sub(now)
	}
	if wait < 0 || wait > longestRetryAfter {
		return 0
	}
	return wait
}
