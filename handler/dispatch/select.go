package dispatch

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// table returns the table of a list of upstreams. A dry route keeps its table: a
// worker that the pool does not know exists only there.
func (rt *Dispatch) table(list reverseproxy.UpstreamPool) *pool.Table {
	if rt.dryTable != nil && rt.dryTable.IsOf(list) {
		return rt.dryTable
	}
	t := rt.lastTable.Load()
	if t == nil || t.Layout != rt.Pool.Layout.Load() || !t.IsOf(list) {
		var lasting bool
		if t, lasting = rt.Pool.NewTable(list, rt.repl, rt.dry); lasting && !rt.dry {
			rt.lastTable.Store(t)
		}
	}
	if rt.dry {
		rt.dryTable = t
	}
	return t
}

// withoutScratch calls a function that waits. The request returns its scratch
// meanwhile: thousands may wait at a time. The candidates are gone afterwards.
func (rt *Dispatch) withoutScratch(ctx context.Context, wait func(context.Context) bool) bool {
	rt.returnScratch()
	defer rt.takeScratch()
	return wait(ctx)
}

func (rt *Dispatch) takeScratch() { rt.scratch = rt.Pool.TakeScratch() }

func (rt *Dispatch) returnScratch() {
	rt.Pool.ReturnScratch(rt.scratch)
	rt.scratch = nil
}

// gather fills in the targets that the request's next attempt can be made on.
func (rt *Dispatch) gather(offered reverseproxy.UpstreamPool, t time.Time) (used pool.Resort, found bool) {
	tab := rt.table(offered)
	if !rt.dry {
		rt.markSeen(tab, t.Unix())
	}
	want := rt.wants()
	rt.model = pool.ModelAmong(tab.Rows, want.Model)
	return rt.Pool.Gather(rt.scratch, &want, rt.model, pool.Offers{Ups: offered, Table: tab}, rt.wait.granted, t)
}

// markSeen records that the workers are upstreams in a second of Unix time. Of a static
// list, one request a second does that.
func (rt *Dispatch) markSeen(tab *pool.Table, second int64) {
	dynamic := rt.Proxy.DynamicUpstreams != nil
	if tab.Seen.Swap(second) == second && !dynamic {
		return
	}
	for i := range tab.Rows {
		w := tab.Rows[i].Worker
		if w.Seen.Load() != second { // all processors share what is only read
			w.Seen.Store(second)
		}
		if dynamic {
			rt.Probes.Met(w)
		}
	}
}

// wants returns what the request needs of the next attempt's worker.
func (rt *Dispatch) wants() pool.Wants {
	e := rt.plan.Ext
	tier, arrival := rt.precedence()
	want := pool.Wants{
		Model: rt.plan.Model, Only: rt.only.worker, Rank: pool.AnyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: rt.apart, API: rt.plan.Name,
		Tried: rt.tried, Slot: rt.plan.Computes, Dry: rt.dry, Tier: tier, Arrival: arrival,
	}
	if len(rt.Proxy.Upstreams) < 2 && rt.Proxy.DynamicUpstreams == nil {
		want.Model = "" // there is no choice
	}
	rank := rt.plan.Pin.Rank
	if rt.only.worker != nil {
		rank = rt.only.rank
	}
	if rank.Set {
		want.Rank = int64(rank.Value)
	}
	return want
}

// offers returns what the proxy offers for the next attempt.
func (rt *Dispatch) offers() pool.Offers {
	return pool.Offers{Ups: rt.offered, Table: rt.table(rt.offered)}
}

// longestHeadStart bounds what a priority is worth, in seconds: more than any request
// waits.
const longestHeadStart = 1e9

// precedence returns the request's place in the queue, in the order of Dynamo's
// queue (lib/kv-router/src/scheduling/queue.rs). Strict priorities are tiers, and the
// higher ones go first. In a tier the time of arrival counts, with a head start of as
// many seconds as the priority says.
func (rt *Dispatch) precedence() (tier int, arrival time.Time) {
	hints := &rt.plan.Ext.AgentHints
	jump := min(hints.PriorityJump(), longestHeadStart)
	return -int(hints.StrictPriority.Value), rt.ready.Add(-time.Duration(jump * float64(time.Second)))
}

// fits returns whether a worker may serve the request.
func (rt *Dispatch) fits(w *pool.Worker) bool {
	want := rt.wants()
	return rt.Pool.Fits(&want, rt.model, w)
}

// checkModel returns the refusal of an inference request for a model that no worker
// serves, nil otherwise.
func (d *Dispatcher) checkModel(p *plan.Plan) *api.Refusal {
	static := d.Proxy.DynamicUpstreams == nil && len(d.Proxy.Upstreams) > 0
	if p.Request == nil || p.Model == "" || !static || !d.Pool.NoneServes(d.Proxy.Upstreams, p.Model) {
		return nil
	}
	return &api.Refusal{API: p.API, Status: http.StatusNotFound, Code: api.CodeNoModel, Param: "model", Err: fmt.Errorf(
		"no worker serves the model %q: GET /v1/models lists those that are served", p.Model)}
}

// work returns the kind of an attempt of the request.
func (rt *Dispatch) work() pool.Work {
	switch {
	case !rt.plan.Computes:
		return pool.WorkNone
	case rt.plan.Request != nil && rt.plan.Request.Stream:
		return pool.WorkStream
	}
	return pool.WorkSilent
}
