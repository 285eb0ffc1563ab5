package dispatch

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// waiting is what a request has to do with full workers.
type waiting struct {
	away       bool          // this turn is not at the session's worker, which stays bound
	granted    *pool.Worker  // the queue has taken a slot of it for the next attempt
	waited     time.Duration // in the queue, over all attempts
	turnedAway *api.Refusal  // why the request is not served
	left       error         // the client's context ended meanwhile
}

// Conditions that last, as the log and the admin API say them.
const (
	incidentOverflow = "too many requests wait, further ones are turned away"
	incidentLate     = "requests that waited too long are turned away"
)

// await waits in the queue until the request can go on: with a slot that was granted,
// or without one, if there is no worker to be waited for. It returns false if the request
// was turned away, or its client left.
func (rt *Dispatch) await(ctx context.Context) bool {
	set := rt.Pool.Settings.Load()
	g, waited := rt.Pool.Wait(ctx, rt.wants(), rt.offers(), min(set.MaxWait-rt.wait.waited, rt.patience()))
	rt.wait.waited += waited
	rt.wait.granted, rt.wait.left = g.Worker, ctx.Err()
	switch {
	case rt.wait.left != nil:
		return false
	case g.Full:
		rt.turnAway(http.StatusTooManyRequests, api.CodeQueueFull, incidentOverflow, fmt.Errorf(
			"all workers are full, and %d requests wait, which is as many as may; try again later", set.MaxWaiting))
		return false
	case g.Late && rt.held.resp != nil:
		return false
	case g.Late:
		rt.turnAway(http.StatusServiceUnavailable, api.CodeQueueTimeout, incidentLate, fmt.Errorf(
			"all workers are full, and none had room within %s; try again later", set.MaxWait))
		return false
	}
	return true
}

// patience returns how long a request waits at most whose refusal by an engine is
// held back: as long as that says. Its client could ask again then.
func (rt *Dispatch) patience() time.Duration {
	if rt.held.resp != nil {
		if wait := retryAfter(rt.held.resp.Header, time.Now()); wait > 0 {
			return wait
		}
	}
	return math.MaxInt64
}

// turnAway records that the operator's limits refuse the request.
func (rt *Dispatch) turnAway(status int, code, incident string, err error) {
	rt.Pool.Incidents.Raise(time.Now(), incident, rt.Pool.Logger)
	rt.Figures.turnedAway[code].Inc()
	rt.wait.turnedAway = &api.Refusal{
		API: rt.plan.API, Status: status, Code: code, Err: err,
		RetryAfter: rt.Pool.Queue.RetryAfter(rt.Pool.Settings.Load().MaxWait),
	}
}

// leave returns the upstream of a request that waits no more and has no worker:
// the transport answers it with what there is. It is no worker's upstream where
// the answer is an error, for Caddy counts errors against upstreams.
func (rt *Dispatch) leave() *reverseproxy.Upstream {
	rt.giveBackGranted()
	rt.exhausted = true
	if rt.held.resp != nil {
		return rt.last
	}
	return noUpstream
}

// errWaiting returns why a request that waited has no worker's answer; nil if it
// has, or did not wait.
func (rt *Dispatch) errWaiting() error {
	if rt.wait.left != nil {
		return rt.wait.left
	}
	if rt.wait.turnedAway != nil && rt.held.resp == nil {
		return lastError{rt.wait.turnedAway}
	}
	return nil
}

// isAway tells whether a session's worker was left out only because it is full:
// the session is elsewhere for one turn, and stays bound.
func (rt *Dispatch) isAway(t kvscore.Target) bool {
	return slices.ContainsFunc(rt.scratch.Full, func(w *pool.Worker) bool { return w.ID == t.Worker })
}

// endWaiting ends what the request has to do with full workers.
func (rt *Dispatch) endWaiting() {
	rt.giveBackGranted()
	if rt.wait.waited > 0 {
		rt.Figures.queueWait.Observe(rt.wait.waited.Seconds())
	}
}

// takeSlot takes a slot of the chosen worker for an attempt. It returns false
// if the worker filled up meanwhile, or a queued request has first claim to its room.
func (rt *Dispatch) takeSlot(w *pool.Worker) bool {
	switch {
	case !rt.plan.Computes:
		return true
	case w == rt.wait.granted:
		rt.wait.granted = nil
		return true
	}
	return rt.Pool.Queue.TakeUnclaimed(w)
}

// giveBackGranted frees the slot that the queue has granted, if it was not used.
func (rt *Dispatch) giveBackGranted() {
	if w := rt.wait.granted; w != nil {
		rt.wait.granted = nil
		rt.Pool.FreeSlot(w)
	}
}
