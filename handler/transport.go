package handler

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// transport makes the attempts. It embeds Caddy's own, so that the optional
// interfaces that the proxy looks for are there.
type transport struct {
	*reverseproxy.HTTPTransport
}

// RoundTrip implements http.RoundTripper. It returns an error that the proxy
// takes for a reason to try again exactly when another worker is left that may
// do better.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	rt, ok := req.Context().Value(routeKey{}).(*route)
	if !ok {
		return t.HTTPTransport.RoundTrip(req) // a health check
	}
	if rt.spent {
		return rt.giveUp()
	}
	resp, resent, err := rt.send(t, req)
	for i := 0; err != nil && resent && i < reconnects && req.Context().Err() == nil && !rt.otherLeft(); i++ {
		// The only worker left closes the connections that it was to keep
		// alive, and the one that net/http took next was one of those, too.
		t.Transport.CloseIdleConnections()
		rt.countRetry(rt.attempt, "reconnect")
		resp, resent, err = rt.send(t, req)
	}
	if err != nil {
		return rt.failed(req, err)
	}
	return rt.answered(req, resp)
}

// reconnects bounds the attempts to get a fresh connection to the last worker.
const reconnects = 2

// send makes one round trip and tells whether net/http sent the request again
// in it, as it does after a connection that was kept alive turned out closed.
func (rt *route) send(t *transport, req *http.Request) (*http.Response, bool, error) {
	resends := new(atomic.Int32)
	resp, err := t.HTTPTransport.RoundTrip(rt.outgoing(req, resends))
	n := resends.Load()
	if n > 0 {
		rt.h.metrics.retries.WithLabelValues(rt.pool.name, rt.attempt.worker.dial, "resend").Add(float64(n))
	}
	return resp, n > 0, err
}

var errResent = errors.New("kv_router: already sent again once")

// outgoing returns the request of this attempt, with the body from its first
// byte.
func (rt *route) outgoing(req *http.Request, resends *atomic.Int32) *http.Request {
	body := rt.plan.body
	if body == nil {
		return req
	}
	out := *req
	out.Header = maps.Clone(req.Header) // of the attempts before and after
	if rt.plan.request != nil {
		// what is compressed cannot be read as it passes
		out.Header.Set("Accept-Encoding", "identity")
	}
	if body.size == 0 {
		return &out
	}
	out.Body, out.ContentLength = body.open(), body.size
	// Engines close idle connections when they please. net/http sends a
	// request again that met such a close, if it can have the body again and
	// takes the request for idempotent; a header without a value says so and
	// is not sent.
	if _, set := out.Header["Idempotency-Key"]; !set {
		out.Header["Idempotency-Key"] = []string{}
	}
	out.GetBody = func() (io.ReadCloser, error) {
		if resends.Add(1) > 1 {
			resends.Add(-1)
			return nil, errResent
		}
		return body.open(), nil
	}
	return &out
}

// repeatable tells whether the request can be made again, after it may have
// reached a worker.
func (rt *route) repeatable(reached bool) bool {
	if rt.plan.body == nil && rt.plan.stream.touched {
		return false
	}
	return !reached || rt.plan.repeatable
}

// failed deals with an attempt that came to no answer.
func (rt *route) failed(req *http.Request, err error) (*http.Response, error) {
	a := rt.attempt
	rt.endAttempt(false)
	if req.Context().Err() != nil {
		return nil, err // the client is gone
	}
	rt.rateDown(a, err.Error(), 0)
	rt.failure = err
	var dial reverseproxy.DialError
	reached := !errors.As(err, &dial)
	if rt.repeatable(reached) && rt.otherLeft() {
		if reached {
			rt.countRetry(a, "broken")
		} else {
			rt.countRetry(a, "refused")
		}
		return nil, retryError{err}
	}
	return rt.giveUp()
}

// giveUp returns the answer that was held back, or else the last failure.
func (rt *route) giveUp() (*http.Response, error) {
	if resp := rt.held; resp != nil {
		rt.held = nil
		rt.answer = &observer{rt: rt, body: resp.Body, status: resp.StatusCode, attempt: rt.attempt}
		resp.Body = rt.answer
		return resp, nil
	}
	if rt.failure == nil {
		rt.failure = errors.New("no worker left")
	}
	return nil, lastError{rt.failure}
}

// answered deals with an attempt that came to an answer.
func (rt *route) answered(req *http.Request, resp *http.Response) (*http.Response, error) {
	a := rt.attempt
	if retryable(resp.StatusCode) {
		rt.rateDown(a, "status "+resp.Status, retryAfter(resp.Header))
		if rt.repeatable(true) && rt.otherLeft() {
			rt.endAttempt(false)
			rt.release()
			rt.held = resp
			rt.countRetry(a, strconv.Itoa(resp.StatusCode))
			return nil, retryError{errors.New("worker answered " + resp.Status)}
		}
	} else if a.worker.health.succeed(a.begun) {
		rt.h.logger.Info("worker is well again", zap.String("pool", rt.pool.name), zap.String("upstream", a.worker.dial))
	}
	rt.release()
	rt.label(resp.Header, a)
	if resp.StatusCode < 300 {
		rt.commit()
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		rt.observe(req, resp)
	}
	return resp, nil
}

// release lets go of an answer that was held back.
func (rt *route) release() {
	if rt.held != nil {
		_ = rt.held.Body.Close()
		rt.held = nil
	}
}

func (rt *route) countRetry(a *attempt, reason string) {
	rt.h.metrics.retries.WithLabelValues(rt.pool.name, a.worker.dial, reason).Inc()
}

// rateDown marks the worker of a failed attempt, with one log line when it was
// well before.
// wait is how long the worker asked to be left alone.
func (rt *route) rateDown(a *attempt, why string, wait time.Duration) {
	if a.worker.health.fail(now(), a.begun, wait) {
		rt.h.logger.Warn("worker is rated down", zap.String("pool", rt.pool.name),
			zap.String("upstream", a.worker.dial), zap.String("why", why))
	}
}

// label adds the response headers that say how the request was routed.
func (rt *route) label(h http.Header, a *attempt) {
	prefix := rt.h.ResponseHeaders
	if prefix == "" {
		return
	}
	h.Set(prefix+"Worker", strconv.FormatUint(a.worker.target.Worker, 10))
	h.Set(prefix+"Dp-Rank", strconv.FormatUint(uint64(a.worker.target.Rank), 10))
	h.Set(prefix+"Reason", a.reason)
	h.Set(prefix+"Overlap-Blocks", strconv.FormatInt(int64(a.terms.OverlapBlocks), 10))
	h.Set(prefix+"Predicted-Cached-Tokens", strconv.FormatInt(a.terms.OverlapTokens, 10))
}

// Interface guards: what the proxy asserts of a transport.
var (
	_ reverseproxy.TLSTransport                        = (*transport)(nil)
	_ reverseproxy.H2CTransport                        = (*transport)(nil)
	_ reverseproxy.ProxyProtocolTransport              = (*transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*transport)(nil)
	_ reverseproxy.RequestHeaderOpsTransport           = (*transport)(nil)
)
