package attempt

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
)

// EndedError says why the router itself ended an attempt.
type EndedError struct {
	Reason string // of the metrics
	text   string
}

// Why the router ended an attempt.
var (
	ErrFirstToken = &EndedError{"first_token", "no first token in time"}
	errStalled    = &EndedError{"stream_idle", "the stream stalled"}
	errHangs      = &EndedError{"hung", "the worker is hung"}
	ErrDrained    = &EndedError{"drain", "the worker is drained, and its streams move"}
)

func (e *EndedError) Error() string { return e.text }

// Timeout lets the proxy answer with 504.
func (*EndedError) Timeout() bool { return true }

func (*EndedError) Temporary() bool { return false }

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
// shows when. Its methods do nothing if it is nil.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	first  *time.Timer   // ends the attempt; nil if the first token has no deadline
	limit  time.Duration // of the first token; 0 is none
	pause  time.Duration // the longest one of an answer; 0 is no limit
	idle   *time.Timer   // made when it is first needed
}

// Bounds say what may end an attempt before its worker or its client does.
type Bounds struct {
	Context context.Context               // of the attempt, if that outlives the client's request
	First   time.Duration                 // for the first token; 0 is no limit
	Idle    time.Duration                 // for a pause of an answer; 0 is no limit
	Movable bool                          // another worker may take over before the header
	Moves   bool                          // the pool may move it once it has its header
	Ends    bool                          // the pool may end it if the worker hangs
	Begins  func(context.CancelCauseFunc) // gets what ends it; nil if nobody needs that
}

// watched returns the request of an attempt. If a deadline may end the attempt, or another
// worker may take over, the request has a watch.
func (a *Attempt) watched(req *http.Request, b *Bounds) *http.Request {
	if b.Begins == nil && (a.Kind == worker.KindOther || a.Kind == worker.KindPlain && !a.Worker.IsHung()) {
		return req // if the worker hangs, the request shows whether it still does
	}
	if b.Begins == nil && b.First == 0 && b.Idle == 0 && !b.Movable && !b.Ends {
		return req
	}
	ctx := req.Context()
	if b.Context != nil {
		ctx = b.Context
	}
	w := &watch{limit: b.First, pause: b.Idle}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	a.watch = w
	if b.Begins != nil {
		b.Begins(w.cancel)
	}
	if b.Ends {
		a.MayEnd(func() { w.cancel(errHangs) })
	}
	if b.Movable {
		a.MayMove()
	}
	if w.limit > 0 {
		w.first = time.AfterFunc(w.limit, func() { w.cancel(ErrFirstToken) })
	}
	return req.WithContext(w.ctx)
}

// MayMove lets the pool move the attempt to another worker.
func (a *Attempt) MayMove() {
	w := a.watch
	a.Seat.MayMove(a.Call.Owner.Wants(), a.Call.Owner.Offers(), func(drained bool) {
		if drained {
			w.cancel(ErrDrained)
		} else {
			w.cancel(errHangs)
		}
	})
}

// arrived ends the wait for an attempt's header and returns its error. A stream may still move.
func (a *Attempt) arrived(resp *http.Response, err error, b *Bounds) error {
	w := a.watch
	if w == nil {
		a.Waits(false)
		return err
	}
	streams := err == nil && a.Streams(resp)
	moved := a.Arrived()
	if !moved && streams && b.Moves {
		a.MayMove()
	}
	if !moved && (streams || !w.StopFirst()) {
		if err != nil && context.Cause(w.ctx) != nil { // the client's, or such as the failure of the prefill
			return context.Cause(w.ctx)
		}
		return err
	}
	if resp != nil {
		_ = resp.Body.Close()
	}
	w.cancel(ErrFirstToken)     // if nothing has canceled it yet
	return context.Cause(w.ctx) // the client may have left first
}

// Streams returns whether an answer is a stream whose events the router may see.
func (a *Attempt) Streams(resp *http.Response) bool {
	return a.Kind == worker.KindStream && resp.StatusCode < 300 && body.MediaType(resp.Header) == body.EventStream
}

// Context returns the attempt's own context, whose cause says why the attempt was ended; nil if it has
// none.
func (w *watch) Context() context.Context {
	if w == nil {
		return nil
	}
	return w.ctx
}

// StopFirst ends the deadline of the first token, and returns whether it is over.
func (w *watch) StopFirst() (late bool) {
	if w == nil || w.first == nil {
		return false
	}
	late = !w.first.Stop()
	w.first = nil
	return late
}

// Suspend stops the deadlines while the router itself has the attempt wait, until the function is
// called.
func (w *watch) Suspend() (goOn func()) {
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

// Await begins or ends a wait for more of an answer that has begun. A wait longer than the allowed
// pause ends the attempt.
func (w *watch) Await(begins bool) {
	switch {
	case w == nil || w.pause == 0:
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
