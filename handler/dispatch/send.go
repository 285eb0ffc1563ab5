package dispatch

import (
	"cmp"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

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
	if a.legs != nil {
		a.legs.sent(d.sent)
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
