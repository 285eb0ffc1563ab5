package handler

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// permits returns whether the client's constraints allow a worker.
func (rt *route) permits(w *worker) bool {
	want := rt.wants()
	return rt.pool.permits(&want, w)
}

// errNonePermitted says what no worker meets.
func (p *plan) errNonePermitted() error {
	var wants []string
	if p.ext.AllowedWorkerIDs != nil {
		wants = append(wants, fmt.Sprintf("nvext.allowed_worker_ids %s", listed(p.ext.AllowedWorkerIDs)))
	}
	if taints := p.ext.RoutingConstraints.RequiredTaints; taints != nil {
		wants = append(wants, fmt.Sprintf("nvext.routing_constraints.required_taints %q", firstOf(taints)))
	}
	return fmt.Errorf("no worker meets %s", strings.Join(wants, " and "))
}

// maxListed is how many ids or names an error repeats.
const maxListed = 8

func firstOf[T any](list []T) []T { return list[:min(len(list), maxListed)] }

func listed(ids []uint64) string {
	if len(ids) > maxListed {
		return fmt.Sprintf("%v and %d more", ids[:maxListed], len(ids)-maxListed)
	}
	return fmt.Sprint(ids)
}

// score returns what the scheduler is told of the request, with what the client
// prefers of the targets at this moment, and the session's target. boundPosition has
// been called.
func (rt *route) score() *kvscore.Request {
	prefers, home := rt.plan.ext.RoutingConstraints.PreferredTaints, rt.homeTarget()
	if len(prefers) == 0 && home == (kvscore.Target{}) {
		return &rt.plan.score
	}
	scored := &rt.scratch.scored
	*scored = rt.plan.score // the plan does not change
	scored.Home = home
	if len(prefers) == 0 {
		return scored
	}
	rt.scratch.factors = slices.Grow(rt.scratch.factors[:0], len(rt.scratch.workers))[:len(rt.scratch.workers)]
	scored.Factors = rt.scratch.factors
	for i, w := range rt.scratch.workers {
		sum := 0.0
		for _, taint := range prefers {
			if slices.Contains(w.tainted(), taint.Name) {
				sum += float64(taint.Weight)
			}
		}
		scored.Factors[i] = preference(sum)
	}
	return scored
}

// preference is Dynamo's multiplier of the cost of a worker whose preferred
// taints weigh so much in all (lib/kv-router/src/protocols.rs,
// preferred_taint_multiplier): from e, which repels, to 1/e, which attracts.
func preference(sum float64) float64 { return math.Exp(-math.Tanh(sum)) }
