package dispatch

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// followUps makes the router's own requests that follow a client's.
type followUps interface {
	// Answering is called when an answer begins. It returns nil if nothing follows. Otherwise
	// the dispatch keeps the request's body.
	Answering(Answering, *http.Response) FollowUp
}

// FollowUp is called once, when a request has ended. It owns the body. text is the answer's
// as JSON; nil if the answer is not whole or not all text. sent is the worker's request.
type FollowUp func(text []byte, whole *body.Replay, sent *http.Request)

// Answering is a request whose answer begins.
type Answering struct {
	Plan     *plan.Plan
	Size     int64 // of its body; -1 if that is not in memory
	Worker   *pool.Worker
	Target   kvscore.Target
	Upstream *reverseproxy.Upstream
	Held     bool // by the engine, as a session: the request has only what is new in it
}

// MaxKeptText bounds the text that is kept of an answer, in bytes of JSON.
const MaxKeptText = 256 << 10

// prepareFollowUp prepares the follow-up when an answer begins.
func (d *Dispatch) prepareFollowUp(resp *http.Response) {
	t := Answering{
		Plan: d.plan, Size: -1, Worker: d.attempt.Worker, Target: d.attempt.Target, Upstream: d.attempt.Upstream,
		Held: d.turn.EngineSession() != "",
	}
	if d.Body != nil {
		t.Size = d.Body.Size
	}
	d.followUp = d.FollowUps.Answering(t, resp)
}

// follow starts the follow-up of a request that has ended.
func (d *Dispatch) follow(outcome string) {
	if d.followUp == nil {
		return
	}
	var text []byte
	if o := d.answer; outcome == outcomeOK && o.computed() {
		text = o.Text
	}
	d.followUp(text, d.takeBody(), d.Sent)
	d.followUp = nil
}
