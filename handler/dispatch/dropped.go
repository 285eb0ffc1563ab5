package dispatch

import (
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// Fallbacks that are found after the plan was made.
const (
	fallbackUnbound     = "unbound"           // the session has no binding
	fallbackUnreadable  = "answer_unreadable" // the engine's answer cannot be read as it passes
	fallbackUnmerged    = "models_unmerged"   // a list of models lacks the other workers' models
	fallbackUntold      = "nvext_untold"      // the answer cannot carry what the client asked for
	FallbackUntokenized = "untokenized"       // a query's answer has no token ids, as no engine returns them
)

// CountDropped counts the wishes of a request that were dropped, and its routing headers
// that cannot be read.
func (d *Dispatcher) CountDropped(p *plan.Plan) {
	for name := range p.Dropped.Names {
		d.Metrics.dropped.WithLabelValues(d.Pool.Name, name).Inc()
	}
	for _, name := range p.Malformed {
		d.Metrics.malformed.WithLabelValues(d.Pool.Name, name).Inc()
	}
	if p.Dropped == 0 && len(p.Malformed) == 0 {
		return
	}
	if c := d.Logger.Check(zap.DebugLevel, "wishes of a client are dropped"); c != nil {
		c.Write(zap.Stringer("not_granted", p.Dropped), zap.Strings("malformed_headers", p.Malformed))
	}
}

// noticeCut counts what was cut out of a body because it was not granted, once for each
// request.
func (rt *Dispatch) noticeCut(grants nvext.Grants) {
	grants &^= rt.cut | rt.plan.Dropped
	if grants == 0 {
		return
	}
	rt.cut |= grants
	for name := range grants.Names {
		rt.Metrics.dropped.WithLabelValues(rt.Pool.Name, name).Inc()
	}
	if c := rt.Logger.Check(zap.DebugLevel, "members that steer the engine are cut out"); c != nil {
		c.Write(zap.Stringer("not_granted", grants))
	}
}

// noticeIneffective records wishes that are granted but that the policy ignores.
func (rt *Dispatch) noticeIneffective() {
	p := rt.plan
	if p.Score.Override == nil && p.Ext.RoutingConstraints.PreferredTaints == nil {
		return
	}
	if unit := kvscore.CostUnit(rt.Policy); unit != kvscore.UnitMilliseconds && unit != kvscore.UnitBlocks {
		rt.Pool.Incidents.Raise(rt.start, "preferred taints or overrides without effect under this policy", rt.Pool.Logger)
	}
}
