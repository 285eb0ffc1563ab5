package dispatch

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// DryChoice is the choice that would be made for a request at this moment.
type DryChoice struct {
	Refused *api.Refusal // by the router itself; nil if it would not
	Full    bool         // the request would wait, because all workers are full
	LeftOut []leftOut

	// What follows is empty if no worker would be chosen.
	Candidates []kvscore.Candidate
	Workers    []*pool.Worker // of Candidates
	Picked     kvscore.Explanation
	Reason     string // of the choice
	Unit       string // of the costs; empty if the policy compares none
	Bound      bool   // the session or the request decided, and no policy was asked
	Home       *DryHome
	Used       pool.Resort
	Tokens     int64 // of the prompt
}

// DryHome is the target that a session is bound to.
type DryHome struct {
	Target   kvscore.Target
	Position int  // among the candidates; -1 if it is none
	Holds    bool // at least half of what any candidate holds of the prompt
	Priced   bool // the policy may leave it, at the price Leave
	Leave    float64
	Stays    bool // the session is still bound to it after this turn
}

// leftOut is a worker that is offered and is no candidate.
type leftOut struct {
	Worker *pool.Worker
	Why    string
}

// Explain makes the choice of a request without booking it, and leaves nothing behind.
// A client that only asks is told a worker even if all are full: it will wait for that
// one.
func (d *Dispatcher) Explain(r *http.Request, p *plan.Plan) *DryChoice {
	t := time.Now()
	rt := &Dispatch{Dispatcher: d, plan: p, start: t, cached: -1, dry: true}
	rt.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	rt.takeScratch()
	defer rt.returnScratch()
	if own := d.checkModel(p); own != nil {
		return &DryChoice{Refused: own}
	}
	if own, ok := errors.AsType[*api.Refusal](rt.narrow(r)); ok {
		return &DryChoice{Refused: own}
	}
	rt.offered = d.upstreams(r)
	c := new(DryChoice)
	used, found := rt.gather(rt.offered, t)
	if !found && len(rt.scratch.Full) > 0 {
		c.Full = true
		if p.Ext.QueryOnly() {
			want := rt.wants()
			want.Slot = false
			used, found = rt.Pool.Gather(rt.scratch, &want, rt.model, rt.offers(), nil, t)
		}
	}
	c.LeftOut = rt.leftOut()
	if !found {
		if !c.Full {
			c.Refused = &api.Refusal{API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Err: rt.errNobody()}
		}
		return c
	}
	bound := rt.boundPosition()
	targets := make([]kvscore.Target, 0, len(rt.scratch.Targets))
	for _, ref := range rt.scratch.Targets {
		targets = append(targets, ref.Target)
	}
	sel := &rt.scratch.Sel
	c.Picked = rt.Pool.Scheduler.Explain(t, rt.score(), targets, bound, rt.policy(), sel)
	c.Candidates, c.Workers = slices.Clone(sel.Candidates), slices.Clone(rt.scratch.Workers)
	c.Reason, c.Unit, c.Bound = rt.reasonOf(bound, &sel.Candidates[c.Picked.Chosen]), kvscore.CostUnit(rt.policy()), bound >= 0
	c.Home, c.Used, c.Tokens = rt.homeOf(c.Picked.Chosen), used, sel.Tokens
	return c
}

// Overlap returns the most tokens of the prompt that a candidate holds.
func (c *DryChoice) Overlap() (most int64) {
	for i := range c.Candidates {
		most = max(most, c.Candidates[i].OverlapTokens)
	}
	return most
}

// homeOf returns the target that the session is bound to as a choice sees it; nil if
// there is none. chosen is the position of the target that would be booked.
func (rt *Dispatch) homeOf(chosen int) *DryHome {
	if rt.bound == 0 {
		return nil
	}
	sel := &rt.scratch.Sel
	h := &DryHome{Target: rt.seenAt, Position: sel.Home, Holds: sel.HomeHolds(), Priced: rt.mayLeave() && !rt.pinned()}
	h.Stays = chosen == sel.Home || rt.wait.away || rt.mayLeave() && h.Holds
	for i := range sel.Candidates {
		h.Leave = max(h.Leave, sel.Candidates[i].Terms.Leave)
	}
	return h
}

// leftOut returns the workers that are offered but are not candidates, with the reason.
func (rt *Dispatch) leftOut() (list []leftOut) {
	rows := rt.table(rt.offered).Rows // which gather has used
	for i, up := range rt.offered {
		w := rows[i].Worker
		if slices.Contains(rt.scratch.Workers, w) {
			continue
		}
		why := "marked_down"
		switch {
		case !pool.Available(up):
			why = "proxy_unavailable" // by its health checks, or it is full
		case rt.pinned() && w != rt.only.worker:
			why = "not_named"
		case !rt.keepsApart(w):
			why = "shares_cache"
		case !rt.permits(w):
			why = "not_allowed"
		case !rt.fits(w):
			why = "other_models"
		case slices.Contains(rt.scratch.Full, w):
			why = "full"
		case w.Draining():
			why = "draining"
		}
		list = append(list, leftOut{w, why})
	}
	return list
}

// upstreams returns those that the proxy would offer for a request.
func (d *Dispatcher) upstreams(r *http.Request) reverseproxy.UpstreamPool {
	if source := d.Proxy.DynamicUpstreams; source != nil {
		if ups, err := source.GetUpstreams(r); err == nil {
			return ups
		}
	}
	return d.Proxy.Upstreams
}
