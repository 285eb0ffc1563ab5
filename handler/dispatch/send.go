package dispatch

import (
	"cmp"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/response"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// RoundTrip makes the attempt that was selected.
func (d *Dispatch) RoundTrip(req *http.Request) (*http.Response, error) {
	if d.exhausted {
		return d.giveUp()
	}
	a := d.attempt
	d.proxied = req
	if d.plan.Everywhere && !d.pinned() && len(d.offers.Ups) > 1 {
		return a.askAll(req)
	}
	resp, resent, err := a.send(req)
	v := a.judge(req.Context(), resp, resent, err)
	if v.do == retry && !v.misfit.free() && !a.affordable(err) {
		v.do = fail
		if resp != nil {
			v.do = deliver
		}
	}
	if v.misfit != fits {
		a.refused(v.misfit)
	}
	if v.do == deliver && (v.misfit != fits || retryable(resp.StatusCode)) && d.putsOff() {
		v.do = putOff
	}
	if v.do != deliver {
		a.Prefilled(time.Now()) // what it has not computed is no recent work
		d.endAttempt(false)
		if v.legs != nil {
			a.ended.Store(true) // its worker is well
		}
	}
	d.Pool.Report(a.Worker, v.outcome)
	if v.suspect {
		d.suspects++
	}
	if err != nil && req.Context().Err() == nil {
		d.failure = err
	}
	switch v.do {
	case deliver:
		return d.deliver(req, resp), nil
	case retry:
		return a.askForRetry(req, resp, &v, err)
	case putOff:
		return a.putOff(req, resp)
	case abandon:
		return nil, err
	case fail:
	}
	return d.giveUp()
}

// send sends the request to the attempt's worker. resent: net/http sent it twice.
func (a *attempt) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	d := a.d
	if err = d.turn.Open(req, a.Worker, a.Target); err != nil {
		return nil, false, err
	}
	if err = a.startLegs(req); err != nil {
		return nil, false, err
	}
	if resp = a.legs.answer(req); resp != nil {
		return resp, false, a.arrived(resp, nil)
	}
	sent := a.watched(req)
	resp, resent, err = a.sendOver(d.Transport.Send, sent)
	if err != nil && resent && d.plan.API != nil && sent.Context().Err() == nil && d.noRetryPossible() {
		// The only worker closed idle connections, and net/http's second try met
		// another one of these.
		d.Pool.CountRetries(a.Worker, "reconnect", 1)
		d.trace.retried(a, "reconnect")
		resp, _, err = a.sendOver(d.Transport.SendFresh, sent)
	}
	if _, unconnected := errors.AsType[reverseproxy.DialError](err); a.legs != nil && !unconnected {
		d.dropSent(a.legs)
	}
	if err = a.arrived(resp, err); err != nil {
		return nil, resent, err
	}
	return resp, resent, nil
}

// sendOver makes one round trip. It returns whether net/http sent the request again after a
// kept connection turned out closed.
func (a *attempt) sendOver(roundTrip sender, req *http.Request) (*http.Response, bool, error) {
	d := a.d
	r := EngineRequest{
		Pool: d.Pool, Plan: d.plan, Body: d.Body, Worker: a.Worker, Target: a.Target,
		Session: d.turn.EngineSession(), shared: d.sent != nil || a.legs != nil, rest: d.rest,
		exact: d.exact && (d.rest == nil && d.goesOn() || d.cutIDs),
	}
	if a.legs != nil {
		r.Leg = &a.legs.leg
	}
	d.sent = d.trace.carry(r.Build(req))
	a.noticeUnsupported(&r)
	d.cutIDs = d.cutIDs || r.cutIDs
	if d.rest != nil && d.rest.Way == api.WayExact {
		roundTrip = a.exactly(roundTrip)
	}
	cut := r.cut &^ (d.cut | d.plan.Dropped) // counted once per request
	d.cut |= cut
	d.CountDropped(cut, nil)
	resp, err := roundTrip(d.sent)
	if err == nil && readsAnswer(d.plan) {
		response.Unpack(resp)
	}
	n := r.resends.Load()
	if n > 0 {
		d.Pool.CountRetries(a.Worker, "resend", int(n))
	}
	return resp, n > 0, err
}

// dropBody frees the body, which is not sent again: an answer may take long.
func (o *outgoing) dropBody() {
	if o.Body != nil {
		o.takeBody().Done()
	}
}

// takeBody takes the request's body from everything that might send it again.
func (o *outgoing) takeBody() *body.Replay {
	whole := o.Body
	o.Body = nil
	if o.lazy != nil {
		o.lazy.Release()
	}
	if o.sent != nil {
		o.sent.GetBody = nil
	}
	return whole
}

// noticeUnsupported records the client's nvext fields that the engine does not support.
func (a *attempt) noticeUnsupported(r *EngineRequest) {
	d := a.d
	if r.unsupported == 0 || !d.plan.TakesSlot {
		return
	}
	for name := range r.unsupported.Names {
		d.Metrics.unsupported.WithLabelValues(d.Pool.Name, cmp.Or(r.engine, engine.Other), name).Inc()
	}
	d.Pool.Incidents.Raise(time.Now(), "clients request nvext fields that the engine does not support", d.Pool.Logger)
}
