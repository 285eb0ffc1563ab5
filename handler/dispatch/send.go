package dispatch

import (
	"cmp"
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// send sends the request to the attempt's worker. resent: net/http sent it twice.
func (a *try) send(req *http.Request) (resp *http.Response, resent bool, err error) {
	d := a.d
	if err = d.turn.Open(req, a.Worker, a.Target); err != nil {
		return nil, false, err
	}
	if err = a.startLegs(req); err != nil {
		return nil, false, err
	}
	b := a.bounds(req)
	if a.Answers != nil {
		return a.legs.answer(req), false, nil
	}
	d.Session, d.AskIDs = d.turn.EngineSession(), d.exact && (d.Rest == nil && d.goesOn() || d.cutIDs)
	resp, resent, err = a.Header(req, &b)
	d.noticeDone(a.Worker)
	if a.legs != nil {
		a.legs.sent(d.Sent)
		a.legs.arrived(resp, err == nil && !a.Streams(resp))
	}
	return resp, resent, err
}

// bounds returns what may end the attempt early.
func (a *try) bounds(req *http.Request) (b attempt.Bounds) {
	d := a.d
	if t := d.Timeouts; a.Kind == pool.KindStream {
		b.First, b.Idle = a.legs.limit(time.Duration(t.FirstToken)), time.Duration(t.StreamIdle)
	}
	b.Movable = a.movable() && !a.legs.wedges()
	b.Moves = d.goesOn() && d.answer.movesLeft() && !a.legs.wedges()
	b.Ends = a.Kind == pool.KindStream && len(d.offers.Ups) > 1
	if a.legs != nil {
		b.Context, b.Begins = context.WithoutCancel(req.Context()), a.legs.watch
	}
	return b
}

// movable returns whether another worker may take over the attempt. It asks before the attempt
// ends, and cannot know whether another worker will be free then.
func (a *try) movable() bool {
	d := a.d
	return d.plan.Request != nil && d.repeatable(true) && !d.pinned() && len(d.offers.Ups) > 1 && !d.lastSuspect() &&
		(!d.Limits.Set() || d.anotherRound())
}

// noticeDone records what was done to the body of the last attempt for its engine.
func (d *Dispatch) noticeDone(w *pool.Worker) {
	d.cutIDs = d.cutIDs || d.CutIDs
	cut := d.Cut &^ (d.cut | d.plan.Dropped) // counted once per request
	d.cut |= cut
	d.CountDropped(cut, nil)
	if d.Unsupported == 0 || !d.plan.TakesSlot {
		return
	}
	for name := range d.Unsupported.Names {
		d.Metrics.unsupported.WithLabelValues(d.Pool.Name, cmp.Or(d.Engine, engine.Other), name).Inc()
	}
	d.Pool.Incidents.Raise(time.Now(), "clients request nvext fields that the engine does not support", d.Pool.Logger)
}

// dropBody frees the body, which is not sent again: an answer may take long.
func (d *Dispatch) dropBody() {
	if d.Body != nil {
		d.takeBody().Done()
	}
}

// takeBody takes the request's body from everything that might send it again.
func (d *Dispatch) takeBody() *body.Replay {
	whole := d.Body
	d.Body = nil
	if d.lazy != nil {
		d.lazy.Release()
	}
	if d.Sent != nil {
		d.Sent.GetBody = nil
	}
	return whole
}
