package dispatch

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// shadow is a policy that decides beside the active one and steers nothing.
type shadow struct {
	policy                  kvscore.Policy
	agreed, differed, fault prometheus.Counter
}

// NewShadow returns a shadow of the active policy.
func NewShadow(p kvscore.Policy, m *Metrics, pool string) *shadow {
	return &shadow{
		policy: p, agreed: m.shadow.WithLabelValues(pool, "true"), differed: m.shadow.WithLabelValues(pool, "false"),
		fault: m.shadowFaults.WithLabelValues(pool),
	}
}

// compare asks the shadow for the choice that the active policy has just made
// and that is booked: at position chosen of rt.scratch.sel.
func (s *shadow) compare(rt *Dispatch, chosen int) {
	sel := rt.scratch.Sel // and candidates of its own, without the active policy's costs
	rt.scratch.Shadow = append(rt.scratch.Shadow[:0], rt.scratch.Sel.Candidates...)
	sel.Candidates = rt.scratch.Shadow
	for i := range sel.Candidates {
		sel.Candidates[i].Cost, sel.Candidates[i].Terms = 0, kvscore.Terms{}
	}
	i, panicked := s.ask(&sel)
	switch {
	case panicked != nil || i < 0 || i >= len(rt.scratch.Targets) || !slices.EqualFunc(sel.Candidates, rt.scratch.Targets, isOf):
		s.fault.Inc()
		rt.Pool.Incidents.Raise(rt.start, "shadow policy that makes no choice", rt.Pool.Logger)
		if c := rt.Logger.Check(zap.DebugLevel, "the shadow made no choice"); c != nil {
			c.Write(zap.Int("position", i), zap.Any("panic", panicked))
		}
	case i == chosen:
		s.agreed.Inc()
	default:
		s.differed.Inc()
		if c := rt.Logger.Check(zap.DebugLevel, "the shadow chose another worker"); c != nil {
			a, b := &rt.scratch.Sel.Candidates[chosen], &sel.Candidates[i]
			c.Write(zap.Stringer("target", rt.scratch.Targets[chosen]), zap.String("upstream", rt.scratch.Workers[chosen].Dial),
				zap.Float64("cost", a.Cost), zap.Float64("overlap_blocks", a.OverlapBlocks), zap.Float64("predicted_ttft_ms", a.TTFT()),
				zap.Stringer("shadow_target", rt.scratch.Targets[i]), zap.String("shadow_upstream", rt.scratch.Workers[i].Dial),
				zap.Float64("shadow_cost", b.Cost), zap.Float64("shadow_overlap_blocks", b.OverlapBlocks), zap.Float64("shadow_predicted_ttft_ms", b.TTFT()))
		}
	}
}

// ask lets the policy choose. What it returns still has to be checked. A panic
// is recovered from here, and only here: the policy may be anybody's, nothing
// of the request depends on it, and the proxy is not inside of this call.
func (s *shadow) ask(sel *kvscore.Selection) (chosen int, panicked any) {
	defer func() { panicked = recover() }()
	return s.policy.Choose(sel), nil
}

// isOf tells whether a candidate is still that of a target.
func isOf(c kvscore.Candidate, t kvscore.TargetRef) bool { return c.Target == t.Target }
