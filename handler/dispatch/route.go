package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"

	"github.com/caddyserver/caddy/v2"
)

// route is where a request may go, and how it chooses. To explain a choice needs no more.
type route struct {
	*Dispatcher
	plan   *plan.Plan
	ready  time.Time // when its body was read
	repl   *caddy.Replacer
	turn   turn.Turn      // its part in its session
	offers pool.Offers    // the proxy's latest
	fixed  fixed          // the one worker that may serve it, if there is one
	tried  []*pool.Worker // in this round over the workers
	beyond int64          // tokens: a worker with room for so many has refused the prompt as too long
	split  split.Request
}

// fixed is the one worker that may serve a request.
type fixed struct {
	worker *pool.Worker // nil if others may, too
	rank   nvext.Opt[uint32]
	reason string
}

// routeOf returns the route of a request.
func (s *Dispatcher) routeOf(p *plan.Plan) route {
	rt := route{Dispatcher: s, plan: p, ready: time.Now()}
	rt.split = split.Request{Pool: s.Pool, Plan: p, Rule: s.Legs, Client: s.Client, FirstToken: time.Duration(s.Timeouts.FirstToken)}
	rt.repl, _ = p.HTTP.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return rt
}

// kind returns the kind of an attempt of the request.
func (rt *route) kind() pool.AttemptKind {
	switch {
	case !rt.plan.TakesSlot:
		return pool.KindOther
	case rt.plan.Request != nil && rt.plan.Request.Stream:
		return pool.KindStream
	}
	return pool.KindPlain
}

// Wants returns the requirements on the next attempt's worker, and the request's place in the
// queue.
func (rt *route) Wants() pool.Wants {
	want := rt.Requires()
	want.Part = rt.split.Part()
	return want
}

// Requires returns the requirements on the workers of both legs.
func (rt *route) Requires() pool.Wants {
	e := rt.plan.Ext
	tier, arrival := rt.precedence()
	want := pool.Wants{
		Model: rt.plan.Model, Only: rt.fixed.worker, Rank: pool.AnyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: rt.plan.Isolated, API: rt.plan.Name, Kind: rt.kind(),
		Session: rt.plan.Session.Opens(), Tried: rt.tried, Tier: tier, Arrival: arrival, Beyond: rt.beyond,
		NoTrial: !rt.plan.ShowsHealth,
	}
	if !rt.Holds() {
		want.Prompt, want.Answer = rt.plan.Length()
	}
	if len(rt.Proxy.Upstreams) < 2 && rt.Proxy.DynamicUpstreams == nil {
		want.Model = "" // there is no choice
	}
	rank := rt.plan.Pin.Rank
	if rt.pinned() {
		rank = rt.fixed.rank
	}
	if rank.Set {
		want.Rank = int64(rank.Value)
	}
	return want
}

// longestHeadStart bounds what a priority is worth, in seconds.
const longestHeadStart = 1e9

// precedence returns the request's place in the queue as Dynamo's
// (lib/kv-router/src/scheduling/queue.rs): a tier by strict priority, then arrival less the
// priority's seconds.
func (rt *route) precedence() (tier int, arrival time.Time) {
	hints := &rt.plan.Ext.AgentHints
	jump := min(hints.PriorityJump(), longestHeadStart)
	return -int(hints.StrictPriority.Value), rt.ready.Add(-time.Duration(jump * float64(time.Second)))
}

// Offers returns the workers that the proxy offers.
func (rt *route) Offers() pool.Offers { return rt.offers }

// otherLeft returns whether a worker may be available that was not tried.
func (rt *route) otherLeft() bool {
	want := rt.Wants()
	for _, v := range rt.Pool.Judge(&want, rt.offers, time.Now()) {
		if v.Possible() {
			return true
		}
	}
	return false
}
