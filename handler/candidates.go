package handler

import (
	"context"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// scratch holds the buffers of one choice. They grow with the pool, so they are
// reused; a request owns them only inside choose.
type scratch struct {
	sel       kvscore.Selection
	targets   []kvscore.TargetRef
	upstreams []*reverseproxy.Upstream // of targets
	workers   []*worker                // of targets
	full      []*worker                // left out only because they are full
	factors   []float64                // of targets, see score
	scored    kvscore.Request          // see score
	shadow    []kvscore.Candidate
}

func (rt *route) takeScratch() {
	s, ok := rt.pool.scratches.Get().(*scratch)
	if !ok {
		s = new(scratch)
	}
	s.sel.Rand = random{}
	rt.scratch = s
}

func (rt *route) returnScratch() {
	rt.scratch.sel.Blocks, rt.scratch.sel.Override = nil, nil
	rt.scratch.scored = kvscore.Request{}
	rt.pool.scratches.Put(rt.scratch)
	rt.scratch = nil
}

// withoutScratch calls a function that waits. The request returns its scratch
// meanwhile: thousands may wait at a time. The candidates are gone afterwards.
func (rt *route) withoutScratch(ctx context.Context, wait func(context.Context) bool) bool {
	rt.returnScratch()
	defer rt.takeScratch()
	return wait(ctx)
}

// gather fills in the targets that the request's next attempt can be made on.
func (rt *route) gather(pool reverseproxy.UpstreamPool, t time.Time) (used resort, found bool) {
	tab, second := rt.table(pool), t.Unix()
	if tab.meets(rt, second) {
		for i := range tab.rows {
			rt.meet(tab.rows[i].worker, second)
		}
	}
	want := rt.wants()
	rt.model = modelAmong(tab.rows, want.Model)
	return rt.pool.gather(rt.scratch, &want, rt.model, offers{pool, tab}, rt.wait.granted, t)
}

// meet notes that a worker is an upstream of a request, in a second of Unix time.
func (rt *route) meet(w *worker, second int64) {
	if w.seen.Load() != second { // what is only read is shared by all processors
		w.seen.Store(second)
	}
	if rt.proxy.DynamicUpstreams != nil {
		rt.probes.Met(w)
	}
}

// wants returns what the request needs of the next attempt's worker.
func (rt *route) wants() Wants {
	e := rt.plan.ext
	tier, arrival := rt.precedence()
	want := Wants{
		Model: rt.plan.model, Only: rt.only.worker, Rank: anyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: rt.apart, API: rt.plan.name,
		Tried: rt.tried, Slot: rt.plan.computes, Dry: rt.dry, Tier: tier, Arrival: arrival,
	}
	if len(rt.proxy.Upstreams) < 2 && rt.proxy.DynamicUpstreams == nil {
		want.Model = "" // there is no choice
	}
	rank := rt.plan.pin.rank
	if rt.only.worker != nil {
		rank = rt.only.rank
	}
	if rank.Set {
		want.Rank = int64(rank.Value)
	}
	return want
}

// offers returns what the proxy offers for the next attempt.
func (rt *route) offers() offers { return offers{rt.offered, rt.table(rt.offered)} }

// longestHeadStart bounds what a priority is worth, in seconds: more than
// anybody waits.
const longestHeadStart = 1e9

// precedence returns the request's place among those who wait, as Dynamo's
// queue orders them (lib/kv-router/src/scheduling/queue.rs): strict priorities
// are tiers, the higher ones first; in a tier the time of arrival counts, with a
// head start of as many seconds as the priority says.
func (rt *route) precedence() (tier int, arrival time.Time) {
	hints := &rt.plan.ext.AgentHints
	jump := min(hints.PriorityJump(), longestHeadStart)
	return -int(hints.StrictPriority.Value), rt.ready.Add(-time.Duration(jump * float64(time.Second)))
}
