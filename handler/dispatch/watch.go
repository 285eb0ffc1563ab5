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
)

func (e *endedError) Error() string { return e.text }

// Timeout lets the proxy answer with 504.
func (*endedError) Timeout() bool { return true }

func (*endedError) Temporary() bool { return false }

// Timeouts bound how long a worker may be silent in a streamed answer. There are none by
// default, because prompts may take long.
type Timeouts struct {
	// How long the first token may take after the router has sent the request. The router
	// then tries one other worker. It answers with 504 if that is late, too, or no worker
	// is left. It holds the answer's header back until the first token. Default: no limit;
	// the router holds the header back for 10 s at most.
	FirstToken caddy.Duration `json:"first_token,omitempty"`

	// How long an answer that has begun may pause. The router then ends it as a broken
	// stream. Time that a client takes to read does not count. Default: no limit.
	StreamIdle caddy.Duration `json:"stream_idle,omitempty"`
}

// heldFor is the longest time for which the router holds back the header of a stream without
// a token. The engine may send the header long before. Until the client has it, another
// worker can take over. Clients may have a limit of their own.
const heldFor = 10 * time.Second

// watch may end an attempt before its worker or its client does. docs/reliability.md
// shows when.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	first  *time.Timer   // ends the attempt; nil if the first token has no deadline
	held   time.Duration // how long the header may be held back; 0 is no limit
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
	movable := a.movable()
	if a.legs == nil && limit == 0 && pause == 0 && !movable {
		return req
	}
	w := &watch{pause: pause}
	w.ctx, w.cancel = context.WithCancelCause(a.legs.detach(req.Context()))
	a.watch = w
	a.legs.watch(w.cancel)
	if movable {
		a.MayMove(&pool.Move{Cancel: func() { w.cancel(errHangs) }, Want: d.wants(), Offers: d.offers})
	}
	if limit > 0 {
		w.first = time.AfterFunc(limit, func() { w.cancel(errFirstToken) })
	}
	if limit == 0 && !probes {
		w.held = heldFor // a deadline, or a move, ends the wait of others
	}
	return req.WithContext(w.ctx)
}

// movable returns whether another worker may take over the attempt. It asks before the attempt
// ends, and cannot know whether another worker will be free then.
func (a *attempt) movable() bool {
	d := a.d
	return d.plan.Request != nil && d.repeatable(true) && !d.pinned() && len(d.offers.Ups) > 1 && !d.lastSuspect() &&
		(!d.Limits.Set() || d.anotherRound())
}

// arrived ends the wait for an attempt's header and returns its error. While another worker
// could take over a stream, arrived also waits for the first token.
func (a *attempt) arrived(resp *http.Response, err error) error {
	w := a.watch
	if w == nil {
		a.Waits(false)
		return err
	}
	if err == nil && a.Kind == pool.KindStream && (w.first != nil || a.movable()) &&
		resp.StatusCode < 300 && body.MediaType(resp.Header) == body.EventStream && !body.Compressed(resp.Header) {
		a.answer = a.deliveryOf(resp)
		err = a.answer.body.AwaitToken(w.held)
	}
	var ended *endedError
	if a.Arrived() {
		ended = errHangs
	}
	if w.first != nil && !w.first.Stop() {
		ended = errFirstToken
	}
	if ended == nil {
		return a.legs.arrived(w.ctx, err) // the worker's or the client's
	}
	w.cancel(ended) // if that has not happened yet
	if resp != nil {
		_ = resp.Body.Close()
	}
	if cause := context.Cause(w.ctx); cause != nil {
		return cause // the client may have left first
	}
	return ended
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
