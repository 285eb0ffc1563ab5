package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func (s *Dispatcher) routeOf(p *plan.Plan) route {
	rt := route{Dispatcher: s, plan: p, ready: time.Now()}
	rt.split = split.Request{Pool: s.Pool, Plan: p, Rule: s.Phases, Client: s.Client, FirstToken: time.Duration(s.Timeouts.FirstToken)}
	rt.repl, _ = p.HTTP.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return rt
}

func (rt *route) kind() worker.AttemptKind {
	switch {
	case !rt.plan.TakesSlot:
		return worker.KindOther
	case rt.plan.Request != nil && rt.plan.Request.Stream:
		return worker.KindStream
	}
	return worker.KindPlain
}

// Wants returns the requirements on the next attempt's worker, and the request's place in the
// queue.
func (rt *route) Wants() pool.Wants {
	want := rt.Requires()
	want.Part = rt.split.Part()
	return want
}

// Requires returns the requirements on the workers of both phases.
func (rt *route) Requires() pool.Wants {
	e := rt.plan.Ext
	ahead := time.Duration(min(e.AgentHints.PriorityJump(), longestHeadStart) * float64(time.Second))
	want := pool.Wants{
		Model: rt.plan.Model, Only: rt.fixed.worker, Rank: pool.AnyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: rt.plan.Isolated, API: rt.plan.Name, Kind: rt.kind(),
		Session: rt.plan.Session.Opens(), Tried: rt.tried, Beyond: rt.beyond,
		// Dynamo's order (lib/kv-router/src/scheduling/queue.rs)
		Tier: -int(e.AgentHints.StrictPriority.Value), Arrival: rt.ready.Add(-ahead),
		NoTrial: !rt.plan.ShowsHealth, Backups: rt.plan.Backups, Declared: rt.Backups,
		Class: rt.plan.Class, Tenant: rt.plan.Tenant.Hash, TenantName: rt.plan.Tenant.Name,
		TenantWeight: rt.Pool.Quota.Weight(rt.plan.Tenant.Hash),
	}
	if target := rt.plan.TTFT; target > 0 {
		want.Deadline = rt.ready.Add(target)
	}
	if !rt.Holds() {
		want.Prompt, want.Answer = rt.plan.Length()
	}
	if len(rt.Proxy.Upstreams) < 2 && rt.Proxy.DynamicUpstreams == nil && rt.plan.Backups == nil {
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

// pinned returns whether only one worker may serve the request.
func (rt *route) pinned() bool { return rt.fixed.worker != nil }

// homed returns whether the session has a home.
func (rt *route) homed() bool {
	home, _ := rt.turn.Home()
	return home != kvscore.Target{}
}

// Holds returns whether the engine of the worker holds the session's state. Its turns send only
// what is new, so they are no prompts of the cache model, and their counts show nothing of it.
func (rt *route) Holds() bool {
	return rt.plan.Session.Held || rt.plan.Session.Opens() || rt.turn.EngineSession() != ""
}

// forgetPrompt makes the prompt of a turn unknown that is only a part of what the engine has.
func (rt *route) forgetPrompt() {
	if score := &rt.plan.Score; rt.Holds() {
		score.Blocks, score.Past, score.Identities = nil, 0, nil
	}
}

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

func (rt *route) Policy() kvscore.Policy {
	if rt.plan.Request == nil {
		return &passThroughPolicy
	}
	return rt.Dispatcher.Policy
}

func (rt *route) reasonOf(unpriced bool, c *kvscore.Candidate) string {
	home, _ := rt.turn.Home()
	switch {
	case rt.pinned():
		return rt.fixed.reason
	case rt.isBackup(c.Target):
		return ReasonOverflow
	case unpriced || c.Target == home:
		return ReasonSession
	case c.OverlapBlocks > 0:
		return reasonOverlap
	}
	return reasonLoad
}

func (rt *route) isBackup(t kvscore.Target) bool {
	w := rt.offers.Worker(t.Worker)
	return rt.plan.Backups != nil && w != nil && w.IsBackup()
}

// upstreams returns those that the proxy would offer for a request.
func (rt *route) upstreams() reverseproxy.UpstreamPool {
	if source := rt.Proxy.DynamicUpstreams; source != nil {
		if ups, err := source.GetUpstreams(rt.plan.HTTP); err == nil {
			return ups
		}
	}
	return rt.Proxy.Upstreams
}

// lookUp looks up the upstreams that the proxy would offer, unless they are known.
func (rt *route) lookUp() {
	if rt.offers.Table == nil {
		rt.offers = rt.tables.Offers(rt.Pool, rt.upstreams(), rt.repl)
	}
}

// closest returns the best verdict on an offered worker: Fits if one may serve the request, else
// what keeps it from that. It returns Fits if no worker is offered.
func (rt *route) closest(want *pool.Wants) pool.Verdict {
	if len(rt.offers.Ups) == 0 {
		return pool.Fits
	}
	closest := pool.NotNamed
	for i := range rt.offers.Table.Rows {
		if w := rt.offers.Table.Rows[i].Worker; !w.IsBackup() {
			closest = min(closest, rt.Pool.Meets(want, w))
		}
	}
	return closest
}

func (rt *route) refuse(status int, code, member string, err error) error {
	return &api.Refusal{API: plan.OrUnplanned(rt.plan.API), Status: status, Code: code, Param: member, Err: err}
}
