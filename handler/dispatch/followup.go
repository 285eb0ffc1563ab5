package dispatch

import (
	"net/http"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// followUps makes requests of the router's own that follow those of clients.
type followUps interface {
	// Arrived is called with the plan of each request before a worker is chosen.
	Arrived(*plan.Plan)
	// Answering is called when an answer begins. It returns nil if nothing is to follow.
	// Else the request's body is kept.
	Answering(Turn, *http.Response) FollowUp
}

// FollowUp is called once, when a request has ended. text is that of an answer which
// came whole, as JSON; nil if it did not, or is not all text. The function owns the
// body. sent is what the worker was sent. All three are nil for an answer that the
// operator's configuration tries again.
type FollowUp func(text []byte, whole *body.Replay, sent *http.Request)

// Turn is a request whose answer begins.
type Turn struct {
	Plan     *plan.Plan
	Size     int64 // of its body; -1 if that is not in memory
	Worker   *pool.Worker
	Target   kvscore.Target
	Upstream *reverseproxy.Upstream
}

// MaxKeptText is the longest answer, in bytes of JSON, whose text is kept for what
// follows.
const MaxKeptText = 256 << 10

// foresee prepares what follows the request, when its answer begins.
func (rt *Dispatch) foresee(resp *http.Response) {
	if rt.next != nil { // of an answer that the operator has tried again
		rt.next(nil, nil, nil)
	}
	t := Turn{Plan: rt.plan, Size: -1, Worker: rt.attempt.Worker, Target: rt.attempt.Target, Upstream: rt.last}
	if rt.Body != nil {
		t.Size = rt.Body.Size
	}
	rt.next = rt.FollowUps.Answering(t, resp)
}

// follow begins what follows the request, which has ended.
func (rt *Dispatch) follow(outcome string) {
	if rt.next == nil {
		return
	}
	var text []byte
	if o := rt.answer; outcome == outcomeOK && o.computed() {
		text = o.Text
	}
	rt.next(text, rt.takeBody(), rt.sent)
	rt.next = nil
}

// Prepared returns a request of the router's own in the words of a worker's engine.
// What is cut out of its body is not counted.
func (d *Dispatcher) Prepared(req *http.Request, p *plan.Plan, whole *body.Replay, w *pool.Worker, t kvscore.Target) *http.Request {
	rt := &Dispatch{Dispatcher: d, plan: p, Body: whole, attempt: &Attempt{Stream: pool.Stream{Worker: w, Target: t}}, cut: nvext.Everything}
	return rt.outgoing(req, new(atomic.Int32))
}
