package dispatch

import (
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// remember has the pool remember the choice of an inference request, so that it can be explained
// later.
func (d *Dispatch) remember(c *pool.Candidates, chosen int, unpriced bool) {
	if d.plan.Request == nil {
		return
	}
	past := pool.PastChoice{
		At: c.At, Request: d.ID, Model: d.Pool.Figures(c.Workers[chosen], d.plan.Model).Model,
		Reason: d.reasonOf(unpriced, &c.Sel.Candidates[chosen]), Tokens: c.Sel.Tokens,
		Attempt: d.attempts + 1, Waited: d.wait.waited,
	}
	if d.Rest != nil {
		past.Rest = d.Rest.Way
	}
	if !unpriced {
		past.Unit = kvscore.CostUnit(d.Policy())
	}
	past.Note(c.Sel.Candidates, func(i int) string { return c.Workers[i].Dial }, chosen)
	d.Pool.Remember(&past)
}
