package handler

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
	Answering(turn, *http.Response) followUp
}

// followUp is called once, when a request has ended. text is that of an answer which
// came whole, as JSON; nil if it did not, or is not all text. The function owns the
// body. sent is what the worker was sent. All three are nil for an answer that the
// operator's configuration tries again.
type followUp func(text []byte, whole *body.Replay, sent *http.Request)

// turn is a request whose answer begins.
type turn struct {
	plan     *plan.Plan
	size     int64 // of its body; -1 if that is not in memory
	worker   *pool.Worker
	target   kvscore.Target
	upstream *reverseproxy.Upstream
}

// maxKeptText is the longest answer, in bytes of JSON, whose text is kept for what
// follows.
const maxKeptText = 256 << 10

// foresee prepares what follows the request, when its answer begins.
func (rt *route) foresee(resp *http.Response) {
	if rt.next != nil { // of an answer that the operator has tried again
		rt.next(nil, nil, nil)
	}
	t := turn{plan: rt.plan, size: -1, worker: rt.attempt.Worker, target: rt.attempt.Target, upstream: rt.last}
	if rt.body != nil {
		t.size = rt.body.Size
	}
	rt.next = rt.followUps.Answering(t, resp)
}

// follow begins what follows the request, which has ended.
func (rt *route) follow(outcome string) {
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

// prepared returns a request of the router's own in the words of a worker's engine.
// What is cut out of its body is not counted.
func (d *dispatcher) prepared(req *http.Request, p *plan.Plan, whole *body.Replay, w *pool.Worker, t kvscore.Target) *http.Request {
	rt := &route{dispatcher: d, plan: p, body: whole, attempt: &attempt{Stream: pool.Stream{Worker: w, Target: t}}, cut: nvext.Everything}
	return rt.outgoing(req, new(atomic.Int32))
}
