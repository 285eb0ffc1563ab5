package dispatch

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2"
)

// endedError says why the router itself ended an attempt.
type endedError struct {
	reason string // of the metrics
	text   string
}

var (
	errFirstToken = &endedError{"first_token", "no first token in time"}
	errStalled    = &endedError{"stream_idle", "the stream stalled"}
	errHangs      = &endedError{"hung", "the worker is hung"}
	errDrained    = &endedError{"drain", "the worker is drained, and its streams move"}
)

func (e *endedError) Error() string { return e.text }

// Timeout lets the proxy answer with 504.
func (*endedError) Timeout() bool { return true }

func (*endedError) Temporary() bool { return false }

// Timeouts bound how long a worker may be silent in a streamed answer. There are none by
// default, because prompts may take long.
type Timeouts struct {
	// How long the first token may take after the router has sent the request. The router
	// then tries one other worker. If that is late, too, or no worker is left, it answers with
	// 504. A client that has the answer's header gets an error event. Default: no limit.
	FirstToken caddy.Duration `json:"first_token,omitempty"`

	// How long an answer that has begun may pause. The stream then goes on at another worker,
	// or ends as a broken stream if it cannot. Time that a client takes to read does not
	// count. Default: no limit.
	StreamIdle caddy.Duration `json:"stream_idle,omitempty"`
}

// watch may end an attempt before its worker or its client does. docs/reliability.md
// shows when.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	first  *time.Timer   // ends the attempt; nil if the first token has no deadline
	limit  time.Duration // of the first token; 0 is none
	pause  time.Duration // the longest one of an answer; 0 is no limit
	idle   *time.Timer   // made when it is first needed
}

// watched returns the request of an attempt. If a deadline may end the attempt, or another
// worker may take over, the request has a watch.
func (a *attempt) watched(req *http.Request) *http.Request {
	d := a.d
	probes := a.Worker.IsHung() // the request shows whether the worker still hangs
	if a.legs == nil && (a.Kind == pool.KindOther || a.Kind == pool.KindPlain && !probes) {
		return req
	}
	var limit, pause time.Duration
	if t := d.Timeouts; a.Kind == pool.KindStream {
		limit, pause = a.legs.limit(time.Duration(t.FirstToken)), time.Duration(t.StreamIdle)
	}
	movable, goesOn := a.movable() && !a.legs.wedges(), d.goesOn()
	ends := a.Kind == pool.KindStream && len(d.offers.Ups) > 1 // if the worker hangs
	if a.legs == nil && limit == 0 && pause == 0 && !movable && !goesOn && !ends {
		return req
	}
	w := &watch{limit: limit, pause: pause}
	w.ctx, w.cancel = context.WithCancelCause(a.legs.detach(req.Context()))
	a.watch = w
	a.legs.watch(w.cancel)
	if ends {
		a.MayEnd(func() { w.cancel(errHangs) })
	}
	if movable {
		a.mayMove()
	}
	if limit > 0 {
		w.first = time.AfterFunc(limit, func() { w.cancel(errFirstToken) })
	}
	return req.WithContext(w.ctx)
}

// mayMove lets the pool move the attempt to another worker.
func (a *attempt) mayMove() {
	w := a.watch
	a.MayMove(&pool.Move{
		Cancel: func(drained bool) {
			if drained {
				w.cancel(errDrained)
			} else {
				w.cancel(errHangs)
			}
		},
		Want: a.d.wants(), Offers: a.d.offers,
	})
}

// movable returns whether another worker may take over the attempt. It asks before the attempt
// ends, and cannot know whether another worker will be free then.
func (a *attempt) movable() bool {
	d := a.d
	return d.plan.Request != nil && d.repeatable(true) && !d.pinned() && len(d.offers.Ups) > 1 && !d.lastSuspect() &&
		(!d.Limits.Set() || d.anotherRound())
}

// arrived ends the wait for an attempt's header and returns its error. A stream may still move.
func (a *attempt) arrived(resp *http.Response, err error) error {
	w := a.watch
	if w == nil {
		a.Waits(false)
		return err
	}
	streams := err == nil && a.streams(resp)
	moved := a.Arrived()
	if !moved && streams && a.d.goesOn() && a.d.answer.movesLeft() && !a.legs.wedges() {
		a.mayMove()
	}
	if !moved && (streams || !w.stopFirst()) {
		return a.legs.arrived(w.ctx, resp, streams, err) // the worker's or the client's
	}
	if resp != nil {
		_ = resp.Body.Close()
	}
	w.cancel(errFirstToken)     // if nothing has canceled it yet
	return context.Cause(w.ctx) // the client may have left first
}

// streams returns whether an answer is a stream whose events the router may see.
func (a *attempt) streams(resp *http.Response) bool {
	return a.Kind == pool.KindStream && resp.StatusCode < 300 && body.MediaType(resp.Header) == body.EventStream
}

// stopFirst ends the deadline of the first token, and returns whether it is over.
func (w *watch) stopFirst() (late bool) {
	if w == nil || w.first == nil {
		return false
	}
	late = !w.first.Stop()
	w.first = nil
	return late
}

// suspend stops the deadlines while the router itself has the attempt wait, until the function is
// called.
func (w *watch) suspend() (goOn func()) {
	if w == nil {
		return func() {}
	}
	first, idle := w.first != nil && w.first.Stop(), w.idle != nil && w.idle.Stop()
	return func() {
		if first {
			w.first.Reset(w.limit)
		}
		if idle {
			w.idle.Reset(w.pause)
		}
	}
}

// await begins or ends a wait for more of an answer. A wait longer than the allowed pause ends
// the attempt.
func (w *watch) await(begins bool) {
	switch {
	case w.pause == 0:
	case !begins:
		if w.idle != nil {
			w.idle.Stop()
		}
	case w.idle == nil:
		w.idle = time.AfterFunc(w.pause, func() { w.cancel(errStalled) })
	default:
		w.idle.Reset(w.pause)
	}
}
