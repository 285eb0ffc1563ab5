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

// leftOut is an offered worker that is not a candidate.
type leftOut struct {
	Worker *pool.Worker
	Why    string
}

// Explain returns the choice for a request without booking it, and leaves nothing behind. A
// query gets a worker even if all are full: its client will wait for that one.
func (s *Dispatcher) Explain(r *http.Request, p *plan.Plan) *DryChoice {
	t := time.Now()
	d := &Dispatch{Dispatcher: s, plan: p, start: t, result: result{cached: -1}, dry: true}
	d.repl, _ = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	d.takeScratch()
	defer d.returnScratch()
	if own := s.checkModel(p); own != nil {
		return &DryChoice{Refused: own}
	}
	var err error
	if d.turn, err = s.Sessions.Enter(r.Context(), p, true); err == nil {
		err = d.narrow(r)
	}
	if own, ok := errors.AsType[*api.Refusal](err); ok {
		return &DryChoice{Refused: own}
	}
	d.offered = s.upstreams(r)
	c := new(DryChoice)
	used, found := d.gather(d.offered, t)
	if !found && len(d.scratch.Full) > 0 {
		c.Full = true
		if p.Ext.QueryOnly() {
			want := d.wants()
			want.Slot = false
			used, found = d.Pool.Gather(d.scratch, &want, d.model, d.offers(), nil, t)
		}
	}
	c.LeftOut = d.leftOut()
	if !found {
		if !c.Full {
			c.Refused = &api.Refusal{API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Err: d.errNobody()}
		}
		return c
	}
	d.turn.Find(r.Context())
	bound := d.boundPosition()
	targets := make([]kvscore.Target, 0, len(d.scratch.Targets))
	for _, ref := range d.scratch.Targets {
		targets = append(targets, ref.Target)
	}
	sel := &d.scratch.Sel
	c.Picked = d.Pool.Scheduler.Explain(t, d.score(), targets, bound, d.policy(), sel)
	c.Candidates, c.Workers = slices.Clone(sel.Candidates), slices.Clone(d.scratch.Workers)
	c.Reason, c.Unit, c.Bound = d.reasonOf(bound, &sel.Candidates[c.Picked.Chosen]), kvscore.CostUnit(d.policy()), bound >= 0
	c.Home, c.Used, c.Tokens = d.homeOf(c.Picked.Chosen), used, sel.Tokens
	return c
}

// Overlap returns the most tokens of the prompt that a candidate holds.
func (c *DryChoice) Overlap() (most int64) {
	for i := range c.Candidates {
		most = max(most, c.Candidates[i].OverlapTokens)
	}
	return most
}

// homeOf returns the session's target in a choice; nil if there is none. chosen is the
// position of the chosen target.
func (d *Dispatch) homeOf(chosen int) *DryHome {
	if !d.homed() {
		return nil
	}
	sel := &d.scratch.Sel
	home, priced := d.turn.Home()
	h := &DryHome{Target: home, Position: sel.Home, Holds: sel.HomeHolds(), Priced: priced && !d.pinned()}
	h.Stays = chosen == sel.Home || d.turn.IsAway() || priced && h.Holds
	for i := range sel.Candidates {
		h.Leave = max(h.Leave, sel.Candidates[i].Terms.Leave)
	}
	return h
}

// leftOut returns the workers that are offered but are not candidates, with the reason.
func (d *Dispatch) leftOut() (list []leftOut) {
	want, rows := d.wants(), d.table(d.offered).Rows // which gather has used
	for i, up := range d.offered {
		w := rows[i].Worker
		if slices.Contains(d.scratch.Workers, w) {
			continue
		}
		why := "marked_down"
		switch {
		case !pool.Available(up):
			why = "proxy_unavailable" // by its health checks, or it is full
		case d.pinned() && w != d.only.worker:
			why = "not_named"
		case !d.Pool.Isolates(&want, w):
			why = "shares_cache"
		case !d.Pool.Permits(&want, w):
			why = "not_allowed"
		case !d.Pool.Fits(&want, d.model, w):
			why = "other_models"
		case slices.Contains(d.scratch.Full, w):
			why = "full"
		case w.Draining():
			why = "draining"
		}
		list = append(list, leftOut{w, why})
	}
	return list
}
