package dispatch

import (
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/split"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// heldAnswer is a worker's answer that calls for a retry. The client gets it if no later attempt
// delivers an answer.
type heldAnswer struct {
	resp    *http.Response
	attempt *attempt.Attempt
}

// drop drops the answer.
func (h *heldAnswer) drop() {
	if h.resp != nil {
		_ = h.resp.Body.Close()
		*h = heldAnswer{}
	}
}

var errNoWorker = errors.New("no worker is available")

// giveUp gives the client the held answer, or else the error for it. err says why no other attempt
// follows.
func (d *Dispatch) giveUp(err error) (*http.Response, error) {
	h := d.held
	switch {
	case d.wait.turnedAway != nil:
		return nil, d.wait.turnedAway
	case h.resp != nil && !d.putsOff():
		d.held = heldAnswer{}
		h.attempt.Label(h.resp.Header)
		d.answer = d.deliveryOf(h.attempt, h.resp)
		return h.resp, nil
	case d.failure != nil:
		return nil, d.failure
	}
	return nil, err
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

// noneFound records that no worker was found for the first attempt.
func (d *Dispatch) noneFound() {
	incident := errNoWorker.Error()
	if d.pinned() {
		incident = "requests pin a worker that is not available"
	}
	d.Pool.Incidents.Raise(time.Now(), incident, d.Pool.Logger)
}

// affordable returns whether the retry budget allows another attempt after err. A failed
// connection is free, because it costs no worker anything. The pool has already charged a move
// from a hung worker, and check one from a silent prefill worker.
func (d *Dispatch) affordable(err error) bool {
	_, unconnected := errors.AsType[reverseproxy.DialError](err)
	return unconnected || d.attempt.Moved() || errors.Is(err, split.ErrPrefillGone) || d.Pool.MayRetry(time.Now())
}
