package dispatch

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
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
func (d *Dispatch) foresee(resp *http.Response) {
	if d.next != nil { // of an answer that the operator has tried again
		d.next(nil, nil, nil)
	}
	t := Turn{Plan: d.plan, Size: -1, Worker: d.attempt.Worker, Target: d.attempt.Target, Upstream: d.last}
	if d.Body != nil {
		t.Size = d.Body.Size
	}
	d.next = d.FollowUps.Answering(t, resp)
}

// follow begins what follows the request, which has ended.
func (d *Dispatch) follow(outcome string) {
	if d.next == nil {
		return
	}
	var text []byte
	if o := d.answer; outcome == outcomeOK && o.computed() {
		text = o.Text
	}
	d.next(text, d.takeBody(), d.sent)
	d.next = nil
}
