package dispatch

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
)

// mayGoOn returns whether the request's stream may go on elsewhere.
func (d *Dispatch) mayGoOn() bool {
	return !d.Resume.IsOff() && d.plan.Request != nil && d.plan.Request.Stream && d.plan.Once == nil && d.plan.Repeatable &&
		!d.plan.Given && !d.pinned() && !d.Holds() && len(d.offers.Ups) > 1
}

// goesOn is mayGoOn, and returns whether the body for it is there.
func (d *Dispatch) goesOn() bool { return d.Body != nil && d.mayGoOn() }

// keepsBody returns whether the body is kept while the answer streams. Bodies of streams have
// half of the memory for bodies, so that there is room for those of new requests.
func (d *Dispatch) keepsBody(resp *http.Response) bool {
	a := d.attempt
	return a.Streams(resp) && !body.Compressed(resp.Header) && resp.ContentLength < 0 && d.goesOn() &&
		d.Pool.Memory.Held.Load() <= body.MaxBytes()/2
}

// freeBody frees the body, unless something else needs it.
func (d *Dispatch) freeBody() {
	if !d.KeepBody && d.followUp == nil {
		d.dropBody()
	}
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

// Track implements response.Mover.
func (o *delivery) Track(a *api.Answer) {
	d := o.d
	if o.noRoom = d.Body == nil; o.noRoom {
		return
	}
	memory := &d.Pool.Memory.Held
	a.Track(d.Body.Data, d.Resume.Tokens, d.exact, func(n int) bool {
		o.room += int64(n)
		return memory.Add(int64(n)) <= body.MaxBytes()
	})
}

// Stays implements response.Mover.
func (o *delivery) Stays() {
	o.attempt.Stay()
	o.d.freeBody()
}

// begin is called with the stream's first token. The rest of a stream without one can come from
// any engine.
func (o *delivery) begin() {
	d := o.d
	if d.Body == nil || !d.mayGoOn() {
		return
	}
	if !resume.IsPossible(d.offers, o.attempt.Worker, d.plan.API.Name(), d.exact) {
		o.Stays()
	}
}
