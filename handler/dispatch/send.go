package dispatch

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

// RoundTrip makes the attempt that was selected.
func (rt *Dispatch) RoundTrip(req *http.Request) (*http.Response, error) {
	if rt.exhausted {
		return rt.giveUp()
	}
	a := rt.attempt
	resp, resent, err := rt.send(req)
	v := rt.judge(req.Context(), resp, resent, err)
	if v.do == retry && !rt.affordable(a, err) {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	if v.do != deliver {
		rt.endAttempt(false)
	}
	rt.reportOutcome(a, &v, err)
	if v.suspect {
		rt.suspects++
	}
	if err != nil && req.Context().Err() == nil {
		rt.failure = err
	}
	switch v.do {
	case deliver:
		return rt.deliver(req, resp), nil
	case retry:
		return rt.retry(req, resp, &v, err)
	case abandon:
		return nil, err
	case fail:
	}
	return rt.giveUp()
}

// send sends the request to the attempt's worker. resent tells whether net/http sent
// it twice.
func (rt *Dispatch) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	sent := rt.guarded(req)
	resp, resent, err = rt.sendOver(rt.Transport.Send, sent)
	if err != nil && resent && rt.plan.API != nil && sent.Context().Err() == nil && rt.stays() {
		// The only worker there is closes the connections that it was to keep
		// alive, and the one that net/http took next was one of those, too.
		rt.countRetry(rt.attempt, "reconnect")
		resp, _, err = rt.sendOver(rt.Transport.SendFresh, sent)
	}
	if err = rt.arrived(resp, err); err != nil {
		return nil, resent, err
	}
	return resp, resent, nil
}

// sendOver makes one round trip and returns whether net/http sent the request again
// in it, as it does after a connection that was kept alive turned out closed.
func (rt *Dispatch) sendOver(roundTrip func(*http.Request) (*http.Response, error), req *http.Request) (*http.Response, bool, error) {
	resends := new(atomic.Int32)
	rt.sent = rt.trace.carry(rt.outgoing(req, resends))
	resp, err := roundTrip(rt.sent)
	if err == nil && rt.readsAnswer() {
		response.Unpack(resp)
	}
	n := resends.Load()
	if n > 0 {
		rt.Pool.CountRetries(rt.attempt.Worker, "resend", int(n))
	}
	return resp, n > 0, err
}

// readsAnswer tells whether the router reads the answer as it passes. It must not
// be compressed then.
func (rt *Dispatch) readsAnswer() bool { return rt.plan.Request != nil || rt.plan.Lists }

var errResent = errors.New("kv_router: already sent again once")

// outgoing returns the request of this attempt, with the body from its first
// byte.
func (rt *Dispatch) outgoing(req *http.Request, resends *atomic.Int32) *http.Request {
	body := rt.Body
	if body == nil {
		req, _ = rt.adapted(req, nil)
		return req
	}
	fit, send := rt.adapted(req, body)
	out := *fit
	if rt.sent != nil {
		out.Header = maps.Clone(out.Header) // an attempt before may still be writing it
	}
	if rt.readsAnswer() {
		out.Header.Set("Accept-Encoding", "identity")
	}
	if body.Size == 0 || req.Body == nil { // the proxy takes it away with `method GET`
		return &out
	}
	out.Body, out.ContentLength = send.Open(), send.Size
	if req.ContentLength < 0 {
		out.ContentLength = -1 // it came in chunks
	}
	// Engines close idle connections when they please. net/http sends a
	// request again that met such a close, if it can have the body again and
	// takes the request for idempotent; a header without a value says so and
	// is not sent. Of what is not an inference that is not known.
	if _, set := out.Header["Idempotency-Key"]; !set && rt.plan.API != nil {
		out.Header["Idempotency-Key"] = []string{}
	}
	out.GetBody = func() (io.ReadCloser, error) {
		if resends.Add(1) > 1 {
			resends.Add(-1)
			return nil, errResent
		}
		return send.Open(), nil
	}
	return &out
}

// dropBody lets go of the request's body: an answer may take long, and the
// body is not sent again.
func (rt *Dispatch) dropBody() {
	if rt.Body != nil {
		rt.takeBody().Done()
	}
}

// takeBody takes the request's body from whoever might send it again.
func (rt *Dispatch) takeBody() *body.Replay {
	body := rt.Body
	rt.Body = nil
	if rt.lazy != nil {
		rt.lazy.Release()
	}
	if rt.sent != nil {
		rt.sent.GetBody = nil
	}
	return body
}

// label adds the response headers that say how the request was routed.
func (rt *Dispatch) label(h http.Header, a *Attempt) {
	prefix := rt.Labels
	if prefix == "" {
		return
	}
	h.Set(prefix+"Worker", strconv.FormatUint(a.Target.Worker, 10))
	h.Set(prefix+"Dp-Rank", strconv.FormatUint(uint64(a.Target.Rank), 10))
	h.Set(prefix+"Reason", a.reason)
	h.Set(prefix+"Overlap-Blocks", strconv.FormatInt(int64(a.terms.OverlapBlocks), 10))
	h.Set(prefix+"Predicted-Cached-Tokens", strconv.FormatInt(a.terms.OverlapTokens, 10))
}
