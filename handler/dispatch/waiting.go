package dispatch

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// waiting is the state of a request in the queue.
type waiting struct {
	granted    *pool.Worker  // the queue has taken a slot of it for the next attempt
	home       *pool.Worker  // the request waits for a slot of it only; nil for any worker
	homeless   bool          // in this attempt, it need not wait for its session's worker any more
	waited     time.Duration // in the queue, over all attempts
	turnedAway *api.Refusal  // why the request is not served
	left       error         // the client's context ended meanwhile
}

// await waits in the queue. It returns true if the request can go on, with a granted slot or
// because no worker is worth waiting for. It returns false if the queue rejected the request
// or its client left.
func (d *Dispatch) await(ctx context.Context) bool {
	set := d.Pool.Settings.Load()
	limit := time.Duration(set.MaxWait) - d.wait.waited
	if d.held.resp != nil { // its client could ask again after the Retry-After
		if wait := retryAfter(d.held.resp.Header); wait > 0 {
			limit = min(limit, wait)
		}
	}
	g, waited := d.Pool.Wait(ctx, d.wants(), d.offers(), limit)
	d.wait.waited += waited
	d.wait.granted, d.wait.left = g.Worker, ctx.Err()
	switch {
	case d.wait.left != nil:
		return false
	case (g.Full || g.Late) && d.held.resp != nil:
		return false // the client gets the held answer, not a refusal
	case g.Full:
		d.turnAway(http.StatusTooManyRequests, api.CodeQueueFull, "the queue is full, and rejects requests", fmt.Errorf(
			"all workers are full, and the queue has its maximum of %d requests; try again later", set.MaxWaiting))
		return false
	case g.Late && d.wait.home != nil:
		d.turnAway(http.StatusServiceUnavailable, api.CodeQueueTimeout, "requests waited too long, and the queue rejected them", fmt.Errorf(
			"the session's worker is full, and had no free slot within %s; try again later", time.Duration(set.MaxWait)))
		return false
	case g.Late:
		d.turnAway(http.StatusServiceUnavailable, api.CodeQueueTimeout, "requests waited too long, and the queue rejected them", fmt.Errorf(
			"all workers are full, and none had a free slot within %s; try again later", time.Duration(set.MaxWait)))
		return false
	}
	return true
}

// awaitHome waits in the queue for the session's worker.
func (d *Dispatch) awaitHome(ctx context.Context, home *pool.Worker) bool {
	d.giveBackGranted() // of another worker: all were full before
	d.wait.home = home
	ok := d.withoutScratch(ctx, d.await)
	d.wait.home = nil
	d.wait.homeless = d.wait.granted == nil
	return ok
}

// turnAway records that the operator's limits refuse the request.
func (d *Dispatch) turnAway(status int, code, incident string, err error) {
	wait := min(time.Duration(d.Pool.Settings.Load().MaxWait), time.Minute) // by then, all that wait now have left the queue
	d.Pool.Incidents.Raise(time.Now(), incident, d.Pool.Logger)
	d.Figures.turnedAway[code].Inc()
	d.wait.turnedAway = &api.Refusal{
		API: d.plan.API, Status: status, Code: code, Err: err,
		RetryAfter: max(1, int(wait/time.Second)),
	}
}

// leave returns the upstream of a request that stops waiting without a worker.
func (d *Dispatch) leave() *reverseproxy.Upstream {
	d.giveBackGranted()
	return d.exhaust()
}

// takeSlot takes a slot of an attempt's worker. It returns false if the worker filled up
// meanwhile, or a queued request has first claim to its room.
func (d *Dispatch) takeSlot(a *attempt) bool {
	switch {
	case !d.plan.Computes:
		return true
	case a.Worker == d.wait.granted:
		d.wait.granted, a.slot = nil, true
	default:
		a.slot = d.Pool.Queue.TakeUnclaimed(a.Worker)
	}
	return a.slot
}

// giveBackGranted frees the slot that the queue has granted, if it was not used.
func (d *Dispatch) giveBackGranted() {
	if w := d.wait.granted; w != nil {
		d.wait.granted = nil
		d.Pool.FreeSlot(w)
	}
}

// pause waits for lb_try_interval. It returns false if the client left meanwhile.
func (d *Dispatch) pause(ctx context.Context) bool {
	timer := time.NewTimer(max(d.Limits.Interval, 10*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
