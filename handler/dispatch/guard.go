package dispatch

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2"
)

// endedError says why the router itself has ended an attempt.
type endedError struct {
	reason string // of the metrics
	text   string
}

var (
	errFirstToken = &endedError{"first_token", "no first token in time"}
	errStalled    = &endedError{"stream_idle", "the stream stalled"}
	errHangs      = &endedError{"hung", "the worker hangs"}
)

// Error implements error.
func (e *endedError) Error() string { return e.text }

// Timeout lets the proxy answer with 504.
func (*endedError) Timeout() bool { return true }

// Temporary completes net.Error.
func (*endedError) Temporary() bool { return false }

// Timeouts bound how long a worker may be silent in a streamed answer. There are none by
// default, because prompts may take long.
type Timeouts struct {
	// How long the first token may take after the router has sent the request. The router
	// holds the answer's header back until then, and tries one other worker. It answers
	// with 504 if that is late, too, or no worker is left. Default: no limit.
	FirstToken caddy.Duration `json:"first_token,omitempty"`

	// How long an answer that has begun may pause. The router then ends it as a broken
	// stream. Time that a client takes to read does not count. Default: no limit.
	StreamIdle caddy.Duration `json:"stream_idle,omitempty"`
}

// guard may end an attempt at a streamed answer before its worker or its client does.
type guard struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	first  *time.Timer   // nil if the first token may take as long as it likes
	late   *endedError   // why that is, if it comes too late
	pause  time.Duration // that an answer may make; 0 is no limit
	idle   *time.Timer   // made when it is first needed
}

// guarded returns the request of an attempt which a deadline or a hung worker may end. Other
// requests are returned as they are.
func (d *Dispatch) guarded(req *http.Request) *http.Request {
	a := d.attempt
	probe := a.Worker.Progress.IsHung()
	if a.Work == pool.WorkNone || a.Work == pool.WorkSilent && !probe {
		return req
	}
	late := errFirstToken
	var limit, pause time.Duration
	if t := d.Timeouts; a.Work == pool.WorkStream {
		limit, pause = time.Duration(t.FirstToken), time.Duration(t.StreamIdle)
	}
	movable := d.movable()
	if probe && movable {
		// what is to show whether the worker still hangs may not be lost there
		silent := 0
		if a.Work == pool.WorkSilent {
			silent = 1
		}
		if patience := d.Pool.Patience(a.lease.Target(), a.Ahead, silent); limit == 0 || patience < limit {
			limit, late = patience, errHangs
		}
	}
	if limit == 0 && pause == 0 && !movable {
		return req
	}
	g := &guard{late: late, pause: pause}
	g.ctx, g.cancel = context.WithCancelCause(req.Context())
	a.guard = g
	if movable {
		a.Worker.Progress.Allow(&a.Stream, &pool.Move{Cancel: func() { g.cancel(errHangs) }, Want: d.wants(), Offers: d.offers()})
	}
	if p := d.Pool; limit > 0 {
		g.first = time.AfterFunc(limit, func() {
			if late == errFirstToken {
				g.cancel(late)
				return
			}
			p.MoveSoon(&a.Stream) // it shows whether its worker is still hung
		})
	}
	return req.WithContext(g.ctx)
}

// movable returns whether the attempt could be made on another worker, as far as is known
// before it is made.
func (d *Dispatch) movable() bool {
	return d.plan.Request != nil && d.repeatable(true) && !d.pinned() && len(d.offered) > 1 && !d.lastSuspect() &&
		(!d.Limits.Set() || d.anotherRound())
}

// arrived ends the wait for an attempt's header and returns its error. If the first token has
// a deadline, arrived holds the header back until that token, so that another worker can be
// tried.
func (d *Dispatch) arrived(resp *http.Response, err error) error {
	a := d.attempt
	g := a.guard
	if g == nil {
		a.Waiting.Store(false)
		return err
	}
	if err == nil && g.first != nil && resp.StatusCode < 300 && body.MediaType(resp.Header) == body.EventStream && !body.Compressed(resp.Header) {
		a.answer = d.deliveryOf(a, resp)
		err = a.answer.body.Hold()
	}
	var ended *endedError
	if a.Worker.Progress.Arrived(&a.Stream) {
		ended = errHangs
	}
	if g.first != nil && !g.first.Stop() && g.late == errFirstToken {
		ended = errFirstToken
	}
	if ended == nil {
		return err // of the worker's or the client's making
	}
	g.cancel(ended) // if that has not happened yet
	if resp != nil {
		_ = resp.Body.Close()
	}
	if cause := context.Cause(g.ctx); cause != nil {
		return cause // the client's leaving, if it came first
	}
	return ended
}

// await begins or ends a wait for more of an answer. A wait longer than the allowed pause ends
// the attempt.
func (g *guard) await(begins bool) {
	switch {
	case g.pause == 0:
	case !begins:
		if g.idle != nil {
			g.idle.Stop()
		}
	case g.idle == nil:
		g.idle = time.AfterFunc(g.pause, func() { g.cancel(errStalled) })
	default:
		g.idle.Reset(g.pause)
	}
}
