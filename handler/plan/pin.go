package plan

import (
	"errors"
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// Pin is the worker, the rank, or both that a request names.
type Pin struct {
	Named  bool // a worker
	Worker uint64
	Field  string // that names the worker
	Rank   nvext.Opt[uint32]
}

// errDirect is Dynamo's own text, which its users know
// (lib/llm/src/kv_router/push_router.rs).
var errDirect = errors.New("Worker ID required (--direct-route) but none found in request. " + //nolint:staticcheck // as Dynamo writes it
	"Expected decode_worker_id or backend_instance_id to be set by external router (e.g., EPP).")

// takePin records which worker the request names. All workers do both phases: a
// request that names another worker for the prefill is refused.
func (p *Plan) takePin() error {
	e := p.Ext
	switch {
	case e.PrefillWorkerID.Set && !samePhases(e):
		return fmt.Errorf("nvext.prefill_worker_id: worker %d cannot be given the prefill alone, as no worker of this pool is of the role prefill", e.PrefillWorkerID.Value)
	case e.PrefillDPRank.Set && !samePhases(e):
		return fmt.Errorf("nvext.prefill_dp_rank: rank %d cannot be given the prefill alone, as no worker of this pool is of the role prefill", e.PrefillDPRank.Value)
	case e.DecodeWorkerID.Set:
		p.Pin = Pin{true, e.DecodeWorkerID.Value, "nvext.decode_worker_id", e.DPRank}
	case e.BackendInstanceID.Set:
		p.Pin = Pin{true, e.BackendInstanceID.Value, "nvext.backend_instance_id", e.DPRank}
	default:
		p.Pin.Rank = e.DPRank
	}
	return nil
}

// samePhases returns whether the request names the same worker and rank for both
// phases, as the router's own answers do.
func samePhases(e *nvext.Ext) bool {
	decode := e.DecodeWorkerID
	if !decode.Set {
		decode = e.BackendInstanceID
	}
	return decode.Set && e.PrefillWorkerID == decode && (!e.PrefillDPRank.Set || e.PrefillDPRank == e.DPRank)
}

// Constrained returns whether the client excludes workers.
func (p *Plan) Constrained() bool {
	return p.Ext.AllowedWorkerIDs != nil || p.Ext.RoutingConstraints.RequiredTaints != nil
}

// ErrNonePermitted returns the error of a request whose constraints no worker meets.
func (p *Plan) ErrNonePermitted() error {
	var wants []string
	if ids := p.Ext.AllowedWorkerIDs; ids != nil {
		more := ""
		if len(ids) > maxListed {
			more = fmt.Sprintf(" and %d more", len(ids)-maxListed)
		}
		wants = append(wants, fmt.Sprintf("nvext.allowed_worker_ids %v%s", firstOf(ids), more))
	}
	if taints := p.Ext.RoutingConstraints.RequiredTaints; taints != nil {
		wants = append(wants, fmt.Sprintf("nvext.routing_constraints.required_taints %q", firstOf(taints)))
	}
	return fmt.Errorf("no worker meets %s", strings.Join(wants, " and "))
}

// maxListed is how many ids or names an error repeats.
const maxListed = 8

func firstOf[T any](list []T) []T { return list[:min(len(list), maxListed)] }
