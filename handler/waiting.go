package handler

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// waiting is what a request has to do with full workers.
type waiting struct {
	away       bool          // this turn is not at the session's worker, which stays bound
	reserved   *worker       // a slot of it was taken for the next attempt
	worse      bool          // that is a worker which is rated down, for want of a better one
	waited     time.Duration // in the queue, over all attempts
	turnedAway *api.Refusal  // why the request is not served
	left       error         // the client's context ended meanwhile
}

// Conditions that last, as the log and the admin API say them.
const (
	incidentFull     = "all workers are full, requests wait"
	incidentOverflow = "too many requests wait, further ones are turned away"
	incidentLate     = "requests that waited too long are turned away"
)

// isFull tells whether the worker has no room for the request. What the router
// has it compute beforehand makes room.
func (rt *route) isFull(w *worker) bool {
	return rt.plan.computes && w != rt.wait.reserved && w.slots.full() && !rt.ignoreSlots &&
		(rt.dry || !rt.pool.yield(w) || w.slots.full())
}

// mustWait tells whether the request has to go through the queue: there is no
// room, or others wait and came first. A slot that is of no use now, as its
// worker has just been rated down, is given back.
func (rt *route) mustWait(found bool) bool {
	if w := rt.wait.reserved; w != nil {
		if slices.Contains(rt.scratch.workers, w) {
			return false
		}
		rt.giveBackReserved()
	}
	return !found || rt.plan.computes && rt.pool.queue.length.Load() > 0
}

// await waits until the request can go on, with a slot reserved or without. It
// returns false if it cannot: it was turned away, or the client left.
func (rt *route) await(ctx context.Context) bool {
	q, set := &rt.pool.queue, rt.pool.settings.Load()
	tier, arrival := rt.precedence()
	me := &waiter{tier: tier, arrival: arrival, group: rt.dispatcher, reseat: rt.seats, verdict: make(chan verdict, 1)}
	q.enter(me, set.maxWaiting)
	var v verdict
	decided := true
	if me.waits {
		began := now()
		rt.pool.incidents.met(began, incidentFull, rt.pool.logger)
		v, decided = q.outcome(ctx, me, min(set.maxWait-rt.wait.waited, rt.patience()))
		rt.wait.waited += now().Sub(began)
	} else {
		v = <-me.verdict
	}
	rt.wait.reserved, rt.wait.worse = v.worker, v.worse
	rt.wait.left = ctx.Err()
	switch {
	case rt.wait.left != nil:
		return false
	case v.full:
		rt.turnAway(http.StatusTooManyRequests, api.CodeQueueFull, incidentOverflow, fmt.Errorf(
			"all workers are full, and %d requests wait, which is as many as may; try again later", set.maxWaiting))
		return false
	case !decided && rt.held.resp != nil:
		return false
	case !decided:
		rt.turnAway(http.StatusServiceUnavailable, api.CodeQueueTimeout, incidentLate, fmt.Errorf(
			"all workers are full, and none had room within %s; try again later", set.maxWait))
		return false
	}
	return true
}

// patience returns how long a request waits at most whose refusal by an engine is
// held back: as long as that says. Its client could ask again then.
func (rt *route) patience() time.Duration {
	if rt.held.resp != nil {
		if wait := retryAfter(rt.held.resp.Header, now()); wait > 0 {
			return wait
		}
	}
	return math.MaxInt64
}

// turnAway takes in that the request is not served, as the operator's limits
// want it.
func (rt *route) turnAway(status int, code, incident string, err error) {
	rt.pool.incidents.met(now(), incident, rt.pool.logger)
	rt.figures.turnedAway[code].Inc()
	rt.wait.turnedAway = &api.Refusal{
		API: rt.plan.api, Status: status, Code: code, Err: err,
		RetryAfter: rt.pool.queue.retryAfter(rt.pool.settings.Load().maxWait),
	}
}

// leave returns the upstream of a request that waits no more and has no worker:
// the transport answers it with what there is. It is no worker's upstream where
// the answer is an error, for Caddy counts errors against upstreams.
func (rt *route) leave() *reverseproxy.Upstream {
	rt.giveBackReserved()
	rt.spent = true
	if rt.held.resp != nil {
		return rt.last
	}
	return nowhere
}

// errWaiting returns why a request that waited has no worker's answer; nil if it
// has, or did not wait.
func (rt *route) errWaiting() error {
	if rt.wait.left != nil {
		return rt.wait.left
	}
	if rt.wait.turnedAway != nil && rt.held.resp == nil {
		return lastError{rt.wait.turnedAway}
	}
	return nil
}

// seats appends the workers that may serve the request and were not tried. It
// is called while the request waits, by whoever looks after the queue.
func (rt *route) seats(list []seat) []seat {
	rt.model = rt.modelFor(rt.offered)
	return rt.seatsKnown(list)
}

// seatsKnown is seats for a request that is under way: it changes nothing of the
// route.
func (rt *route) seatsKnown(list []seat) []seat {
	for i, row := range rt.table(rt.offered).rows {
		if w := row.worker; !row.again && !slices.Contains(rt.tried, w) && rt.fits(w) {
			list = append(list, seat{rt.offered[i], w})
		}
	}
	return list
}

// isAway tells whether a session's worker was left out only because it is full:
// the session is elsewhere for one turn, and stays bound.
func (rt *route) isAway(t kvscore.Target) bool {
	return slices.ContainsFunc(rt.scratch.full, func(w *worker) bool { return w.id == t.Worker })
}

// endWaiting ends what the request has to do with full workers.
func (rt *route) endWaiting() {
	rt.giveBackReserved()
	if rt.wait.waited > 0 {
		rt.figures.queueWait.Observe(rt.wait.waited.Seconds())
	}
}

// waitView says that a request would wait, and behind how many.
type waitView struct {
	Before int `json:"waiting_requests"`
}
