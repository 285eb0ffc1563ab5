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
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func (d *Dispatch) see(ups reverseproxy.UpstreamPool) {
	d.offers = d.tables.Offers(d.Pool, ups, d.repl)
	dynamic := d.Proxy.DynamicUpstreams != nil
	d.Pool.See(d.offers, time.Now(), dynamic)
	if dynamic {
		for i := range d.offers.Table.Rows {
			d.Probes.Discovered(d.offers.Table.Rows[i].Worker)
		}
	}
}

// follower is a source of upstreams that knows at once when they change, and never blocks.
type follower interface {
	// Version changes with the upstreams. It is 0 while the source does not know them.
	Version() uint64
}

// Renew implements pool.Chooser.
func (d *Dispatch) Renew() (o pool.Offers, follows bool) {
	source, ok := d.Proxy.DynamicUpstreams.(follower)
	if !ok {
		return d.offers, false
	}
	if v := source.Version(); v != d.version {
		ups, err := d.Proxy.DynamicUpstreams.GetUpstreams(d.plan.HTTP)
		if err != nil {
			return d.offers, false
		}
		d.version = v
		d.see(ups)
	}
	return d.offers, d.version != 0
}

// Seated returns whether a worker was found. Any goroutine may call it.
func (d *Dispatch) Seated() bool { return d.seated.Load() }

// seat finds a seat on a worker, and begins an attempt there.
func (d *Dispatch) seat(ctx context.Context) error {
	want, a := d.Wants(), new(attempt.Attempt)
	want.ID, want.Again = d.ID, d.attempts > 0
	if want.Rest = d.answer != nil; want.Rest && d.Rest != nil && d.Rest.Way != api.WayWhole {
		want.Backups = nil // which may have another model
	}
	if err := d.reserve(ctx, &want, &d.offers, d, a); err != nil {
		return err
	}
	if a.Upstream.Host == nil { // the proxy has not seen it
		a.Upstream.Host = new(reverseproxy.Host)
	}
	d.attempts++
	d.seated.Store(true)
	d.attempt, d.phases = a, nil // at once: End ends it if anything below panics
	a.Worker.Requested(d.plan.Model)
	d.turn.Choose(a.Target)
	d.tried = append(d.tried, a.Worker)
	a.Chosen(d.reasonOf(a.Unpriced, &a.Terms), d.attempts, kvscore.CostUnit(d.policy))
	return nil
}

// reserve takes a seat for an attempt, within the time that the request may wait in the queue.
func (d *Dispatch) reserve(ctx context.Context, want *pool.Wants, o *pool.Offers, by pool.Chooser, a *attempt.Attempt) error {
	want.Patience = time.Duration(d.Pool.Settings.Load().MaxWait) - d.wait.waited
	if d.held.resp != nil { // its client could ask again after the Retry-After
		if wait := attempt.RetryAfter(d.held.resp.Header); wait > 0 {
			want.Patience = min(want.Patience, wait)
		}
	}
	waited, err := d.Pool.Seat(ctx, want, o, by, &a.Seat)
	d.wait.waited, d.wait.since = d.wait.waited+waited, time.Time{}
	if err == nil {
		a.Call = &d.Call
	}
	return err
}

// endAttempt ends the present attempt with its phases, if there is one. computed: the worker has computed
// the prompt.
func (d *Dispatch) endAttempt(computed bool) {
	a, o := d.attempt, d.answer
	if a == nil || a.Left() {
		return
	}
	var answer []uint64
	if computed && o != nil && !d.Holds() {
		answer = o.Blocks
	}
	if d.phases != nil {
		d.phases.Leave(o != nil && o.attempt == a && o.Whole)
		computed = computed && a.Answers == nil
	}
	a.Leave(computed, answer)
	d.turn.RollBack()
}

// longestRetryAfter bounds what a prediction tells clients.
const longestRetryAfter = 10 * time.Minute

// turnAway records that the operator's limits refuse the request. err is the queue's.
func (d *Dispatch) turnAway(err error) {
	set := d.Pool.Settings.Load()
	most := time.Duration(set.MaxWait)
	e := &api.Refusal{
		API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeQueueTimeout,
		RetryAfter: max(1, int(min(most, time.Minute)/time.Second)), // by then, all that wait now have left the queue
	}
	var late *pool.LateError
	incident := "requests waited too long, and the queue rejected them"
	reason := turnedAwayTimeout
	all := "all workers are full"
	if len(d.offers.Ups) == 0 {
		all = "there are no workers now"
	}
	switch {
	case errors.Is(err, pool.ErrQueueFull):
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeQueueFull
		e.Err = fmt.Errorf("%s, and %d requests wait, which is the most; try again later", all, set.MaxWaiting)
		incident = "the queue is full, and rejects requests"
		reason = turnedAwayFull
		if c := d.plan.Class; c != nil && c.Background {
			reason = turnedAwayBackground
		}
	case errors.Is(err, pool.ErrHomeWaited):
		e.Err = fmt.Errorf("the session's worker is full, and had no free slot within %s; try again later", most)
	case errors.As(err, &late):
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeLate
		e.Err = fmt.Errorf("%w; try again later", late)
		e.RetryAfter = max(1, int(min(late.After(), longestRetryAfter).Round(time.Second)/time.Second))
		incident = "requests would be late, and are refused"
		reason = turnedAwayLate
		d.promised(promiseRefused)
	default:
		e.Err = fmt.Errorf("%s, and none had a free slot within %s; try again later", all, most)
	}
	d.Pool.Raise(time.Now(), incident, e.Err)
	d.Metrics.turnedAway.WithLabelValues(d.Pool.Name, reason).Inc()
	if late == nil {
		d.Pool.Outcomes.Count(time.Now(), d.plan.ClassName(), e.Code)
	}
	d.wait.turnedAway = e
}
