package dispatch

import (
	"math"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// score returns the scheduler's view of the request: the plan's, with the client's preferred taints
// and the target of the session or of its parent. Workers that must load the model cost more.
func (rt *route) score(c *pool.Candidates) *kvscore.Request {
	prefers := rt.plan.Ext.RoutingConstraints.PreferredTaints
	home := rt.turn.Warm()
	apart, ways := rt.split.Ways(c)
	loads := rt.plan.Model != "" && slices.ContainsFunc(c.Workers, (*pool.Worker).LoadsOnDemand)
	if len(prefers) == 0 && !loads && home == (kvscore.Target{}) && ways == nil {
		return &rt.plan.Score
	}
	scored := &c.Scored
	*scored = rt.plan.Score // the plan does not change
	scored.Home, scored.Apart, scored.Ways = home, apart, ways
	if len(prefers) == 0 && !loads {
		return scored
	}
	c.Factors = slices.Grow(c.Factors[:0], len(c.Workers))[:len(c.Workers)]
	scored.Factors = c.Factors
	for i, w := range c.Workers {
		sum := 0.0
		for _, taint := range prefers {
			if slices.Contains(w.Tainted(), taint.Name) {
				sum += float64(taint.Weight)
			}
		}
		scored.Factors[i] = preference(sum) * w.LoadFactor(rt.plan.Model)
	}
	return scored
}

// preference returns Dynamo's factor of a worker's cost by the sum of its preferred taints'
// weights: e repels, 1/e attracts (lib/kv-router/src/protocols.rs,
// preferred_taint_multiplier).
func preference(sum float64) float64 { return math.Exp(-math.Tanh(sum)) }

// shadow is a policy that chooses beside the active one, without effect.
type shadow struct {
	policy                  kvscore.Policy
	agreed, differed, fault prometheus.Counter
}

// NewShadow returns a shadow of the active policy; nil if p is nil.
func NewShadow(p kvscore.Policy, m *Metrics, pool string) *shadow {
	if p == nil {
		return nil
	}
	return &shadow{
		policy: p, agreed: m.shadow.WithLabelValues(pool, "true"), differed: m.shadow.WithLabelValues(pool, "false"),
		fault: m.shadowFaults.WithLabelValues(pool),
	}
}

// compare asks the shadow for the choice that the active policy has just made. chosen is the
// position of that.
func (s *shadow) compare(d *Dispatch, c *pool.Candidates, chosen int) {
	sel := c.Sel // and candidates of its own, without the active policy's costs
	c.Shadow = append(c.Shadow[:0], c.Sel.Candidates...)
	sel.Candidates = c.Shadow
	for i := range sel.Candidates {
		sel.Candidates[i].Cost, sel.Candidates[i].Terms = 0, kvscore.Terms{}
	}
	i, panicked := s.ask(&sel)
	switch {
	case panicked != nil || i < 0 || i >= len(c.Shadow):
		s.fault.Inc()
		d.Pool.Incidents.Raise(d.start, "the shadow policy returns invalid workers", d.Pool.Logger)
	case i == chosen:
		s.agreed.Inc()
	default:
		s.differed.Inc()
		if log := d.Logger.Check(zap.DebugLevel, "shadow policy chose another worker"); log != nil {
			a, b := &c.Sel.Candidates[chosen], &c.Shadow[i]
			log.Write(zap.Stringer("target", c.Targets[chosen]), zap.String("upstream", c.Workers[chosen].Dial),
				zap.Float64("cost", a.Cost), zap.Float64("overlap_blocks", a.OverlapBlocks),
				zap.Stringer("shadow_target", c.Targets[i]), zap.String("shadow_upstream", c.Workers[i].Dial),
				zap.Float64("shadow_cost", b.Cost), zap.Float64("shadow_overlap_blocks", b.OverlapBlocks))
		}
	}
}

// ask lets the policy choose, and recovers from its panics: the request does not depend on
// it.
func (s *shadow) ask(sel *kvscore.Selection) (chosen int, panicked any) {
	defer func() { panicked = recover() }()
	return s.policy.Choose(sel), nil
}

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

func (rt *route) Policy() kvscore.Policy {
	if rt.plan.Request == nil {
		return &passThroughPolicy
	}
	return rt.Dispatcher.Policy
}

// reasonOf returns why a candidate was chosen.
func (rt *route) reasonOf(unpriced bool, c *kvscore.Candidate) string {
	home, _ := rt.turn.Home()
	switch {
	case rt.pinned():
		return rt.fixed.reason
	case unpriced || c.Target == home:
		return ReasonSession
	case c.OverlapBlocks > 0:
		return reasonOverlap
	}
	return reasonLoad
}

// costsTime returns whether the cost of a choice is in milliseconds, and has terms.
func (rt *route) costsTime(s *pool.Seat) bool {
	return !s.Unpriced && kvscore.CostUnit(rt.Policy()) == kvscore.UnitMilliseconds
}
