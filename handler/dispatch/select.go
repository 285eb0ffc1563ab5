package dispatch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Selector is the proxy's selection policy. The choice itself is the dispatch's.
type Selector struct{}

// Select implements reverseproxy.Selector.
func (Selector) Select(ups reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if d := dispatchOf(r.Context()); d != nil {
		d.original = upstream.Original{Header: r.Header, Host: r.Host}
		return d.Select(r.Context(), ups)
	}
	return nil
}

// Select finds a seat for the first attempt, and returns its upstream; nil if there is none. Caddy's
// proxy then prepares the request for that worker, and calls RoundTrip.
func (d *Dispatch) Select(ctx context.Context, ups reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	d.see(ups)
	switch err := d.next(ctx, nil); {
	case err == nil:
		return d.attempt.Upstream
	case errors.Is(err, pool.ErrNoWorker):
		d.noneFound()
	}
	return nil
}

// see records the upstreams that the proxy offers.
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

// seat finds a seat on a worker, and begins an attempt there.
func (d *Dispatch) seat(ctx context.Context) error {
	want, a := d.Wants(), new(attempt.Attempt)
	if err := d.reserve(ctx, &want, &d.offers, d, a); err != nil {
		return err
	}
	if a.Upstream.Host == nil { // the proxy has not seen it
		a.Upstream.Host = new(reverseproxy.Host)
	}
	d.attempts++
	d.attempt, d.phases = a, nil // at once: End ends it if anything below panics
	a.Worker.Requested(d.plan.Model)
	d.turn.Choose(a.Target)
	d.tried = append(d.tried, a.Worker)
	d.begin(a, d.reasonOf(a.Unpriced, &a.Terms))
	return nil
}

// reserve takes a seat for an attempt, within the request's patience.
func (d *Dispatch) reserve(ctx context.Context, want *pool.Wants, o *pool.Offers, by pool.Chooser, a *attempt.Attempt) error {
	want.Patience = d.patience()
	waited, err := d.Pool.Seat(ctx, want, o, by, &a.Seat)
	d.wait.waited += waited
	if err == nil {
		a.Seated(&d.Call)
	}
	return err
}

// begin begins an attempt that has a seat.
func (d *Dispatch) begin(a *attempt.Attempt, reason string) {
	a.Reason, a.Number, a.CostsTime = reason, d.attempts, d.costsTime(&a.Seat)
	a.Log()
	d.Trace.Selected(a)
}

// Choose implements pool.Chooser.
func (d *Dispatch) Choose(ctx context.Context, c *pool.Candidates) pool.Choice {
	switch state := c.Tier.State(); {
	case d.pinned(): // whatever it is at
	case state == pool.Reluctant:
		d.Pool.Incidents.Raise(c.At, "only prefill workers are available, and they serve whole requests", d.Pool.Logger)
	case state >= pool.Draining:
		d.Pool.Incidents.Raise(c.At, "only draining workers are left, and the router uses them", d.Pool.Logger)
	case state == pool.MarkedDown && len(d.tried) == 0 && d.othersWell(c.At):
		d.Pool.Incidents.Raise(c.At, "all workers of a model are marked down, and the router uses them anyway", d.Pool.Logger)
	case state == pool.MarkedDown && len(d.tried) == 0:
		d.Pool.Incidents.Raise(c.At, "all workers are marked down, and the router uses them anyway", d.Pool.Logger)
	}
	if d.turn.Find(ctx); d.turn.Pending() && !d.pinned() && !c.Granted {
		return pool.Choice{Wait: d.turn.Await}
	}
	return d.choice(c)
}

// othersWell returns whether a worker that may not serve the request takes requests.
func (d *Dispatch) othersWell(t time.Time) bool {
	return slices.ContainsFunc(d.offers.Table.Rows, func(row pool.TableRow) bool { return row.Worker.TakesRequests(t) })
}

// choice returns how to choose among candidates, once the session is found.
func (rt *route) choice(c *pool.Candidates) pool.Choice {
	bound := rt.boundPosition(c)
	return pool.Choice{Request: rt.score(c), Policy: rt.Policy(), Bound: bound, Home: rt.fullHome(c)}
}

// Waits implements pool.Chooser: no request waits for one that is queued.
func (d *Dispatch) Waits() { d.turn.Yield() }

// Chosen implements pool.Chooser. It logs what degraded the choice. The session stays bound if
// its worker holds the prompt but the policy chose another worker.
func (d *Dispatch) Chosen(c *pool.Candidates, i int, unpriced bool) {
	sel := &c.Sel
	if sel.Fault {
		const incident = "the policy returns invalid workers, and the router takes the least loaded one"
		d.Pool.Incidents.Raise(c.At, incident, d.Pool.Logger)
	}
	if sel.Unknown > 0 {
		d.Pool.Incidents.Raise(c.At, "the load of some workers is unknown, and the router assumes the median", d.Pool.Logger)
	}
	d.remember(c, i, unpriced)
	if unpriced {
		return
	}
	if d.homed() && i != sel.Home && sel.HomeHolds() {
		d.turn.GoAway()
	}
	if d.Shadow != nil && d.plan.Request != nil {
		d.Shadow.compare(d, c, i)
	}
}
