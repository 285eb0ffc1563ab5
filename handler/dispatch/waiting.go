package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// waiting is what the request's waits came to, over all attempts.
type waiting struct {
	waited     time.Duration // in the queue
	turnedAway *api.Refusal  // why the request is not served
	left       error         // the client's context ended meanwhile
}

// patience returns how much longer the request may wait in the queue.
func (d *Dispatch) patience() time.Duration {
	limit := time.Duration(d.Pool.Settings.Load().MaxWait) - d.wait.waited
	if d.held.resp != nil { // its client could ask again after the Retry-After
		if wait := attempt.RetryAfter(d.held.resp.Header); wait > 0 {
			limit = min(limit, wait)
		}
	}
	return limit
}

// turnAway records that the operator's limits refuse the request. err is the queue's.
func (d *Dispatch) turnAway(err error) {
	set := d.Pool.Settings.Load()
	most := time.Duration(set.MaxWait)
	e := &api.Refusal{
		API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeQueueTimeout,
		RetryAfter: max(1, int(min(most, time.Minute)/time.Second)), // by then, all that wait now have left the queue
	}
	incident := "requests waited too long, and the queue rejected them"
	all := "all workers are full"
	if len(d.offers.Ups) == 0 {
		all = "there are no workers now"
	}
	switch {
	case errors.Is(err, pool.ErrQueueFull):
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeQueueFull
		e.Err = fmt.Errorf("%s, and %d requests wait, which is the most; try again later", all, set.MaxWaiting)
		incident = "the queue is full, and rejects requests"
	case errors.Is(err, pool.ErrHomeWaited):
		e.Err = fmt.Errorf("the session's worker is full, and had no free slot within %s; try again later", most)
	default:
		e.Err = fmt.Errorf("%s, and none had a free slot within %s; try again later", all, most)
	}
	d.Pool.Incidents.Raise(time.Now(), incident, d.Pool.Logger)
	d.PoolMetrics.turnedAway[e.Code].Inc()
	d.wait.turnedAway = e
}

// pause waits for lb_try_interval. It returns false if the client left meanwhile.
func (d *Dispatch) pause(ctx context.Context) bool {
	d.turn.Yield()
	timer := time.NewTimer(max(d.Limits.Interval, 10*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
