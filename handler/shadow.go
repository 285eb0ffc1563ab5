package handler

import (
	"fmt"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// shadow is a policy that decides beside the active one and steers nothing.
type shadow struct {
	policy                  kvscore.Policy
	agreed, differed, fault prometheus.Counter
}

// loadShadow loads the shadow, if one is configured.
func (h *Handler) loadShadow(ctx caddy.Context) error {
	if h.ShadowRaw == nil {
		return nil
	}
	p, err := h.policyOf(ctx, "ShadowRaw")
	if err != nil {
		return fmt.Errorf("shadow: %w", err)
	}
	h.dispatcher.shadow = &shadow{
		policy:   p,
		agreed:   h.metrics.shadow.WithLabelValues(h.Pool, "true"),
		differed: h.metrics.shadow.WithLabelValues(h.Pool, "false"),
		fault:    h.metrics.shadowFaults.WithLabelValues(h.Pool),
	}
	return nil
}

// compare asks the shadow for the choice that the active policy has just made
// and that is booked: at position chosen of rt.scratch.sel.
func (s *shadow) compare(rt *route, chosen int) {
	sel := rt.scratch.sel // and candidates of its own, without the active policy's costs
	rt.scratch.shadow = append(rt.scratch.shadow[:0], rt.scratch.sel.Candidates...)
	sel.Candidates = rt.scratch.shadow
	for i := range sel.Candidates {
		sel.Candidates[i].Cost, sel.Candidates[i].Terms = 0, kvscore.Terms{}
	}
	i, panicked := s.ask(&sel)
	switch {
	case panicked != nil || i < 0 || i >= len(rt.scratch.targets) || !slices.EqualFunc(sel.Candidates, rt.scratch.targets, isOf):
		s.fault.Inc()
		rt.pool.incidents.met(rt.start, "shadow policy that makes no choice", rt.pool.logger)
		if c := rt.logger.Check(zap.DebugLevel, "the shadow made no choice"); c != nil {
			c.Write(zap.Int("position", i), zap.Any("panic", panicked))
		}
	case i == chosen:
		s.agreed.Inc()
	default:
		s.differed.Inc()
		if c := rt.logger.Check(zap.DebugLevel, "the shadow chose another worker"); c != nil {
			a, b := &rt.scratch.sel.Candidates[chosen], &sel.Candidates[i]
			c.Write(zap.Stringer("target", rt.scratch.targets[chosen]), zap.String("upstream", rt.scratch.workers[chosen].dial),
				zap.Float64("cost", a.Cost), zap.Float64("overlap_blocks", a.OverlapBlocks), zap.Float64("predicted_ttft_ms", a.TTFT()),
				zap.Stringer("shadow_target", rt.scratch.targets[i]), zap.String("shadow_upstream", rt.scratch.workers[i].dial),
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
