package handler

import (
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// pin is the worker, the rank, or both that a request names.
type pin struct {
	named  bool   // a worker
	worker uint64 // its id
	field  string // that names it
	rank   nvext.Opt[uint32]
}

// errDirect is Dynamo's own text, which its users know
// (lib/llm/src/kv_router/push_router.rs).
var errDirect = errors.New("Worker ID required (--direct-route) but none found in request. " + //nolint:staticcheck // as Dynamo writes it
	"Expected decode_worker_id or backend_instance_id to be set by external router (e.g., EPP).")

// takePin records which worker the request names. All workers do both phases: a
// request that names another worker for the prefill is refused.
func (p *plan) takePin() error {
	e := p.ext
	switch {
	case e.PrefillWorkerID.Set && !samePhases(e):
		return fmt.Errorf("nvext.prefill_worker_id: worker %d cannot be given the prefill alone, as no worker of this pool is of the role prefill", e.PrefillWorkerID.Value)
	case e.PrefillDPRank.Set && !samePhases(e):
		return fmt.Errorf("nvext.prefill_dp_rank: rank %d cannot be given the prefill alone, as no worker of this pool is of the role prefill", e.PrefillDPRank.Value)
	case e.DecodeWorkerID.Set:
		p.pin = pin{true, e.DecodeWorkerID.Value, "nvext.decode_worker_id", e.DPRank}
	case e.BackendInstanceID.Set:
		p.pin = pin{true, e.BackendInstanceID.Value, "nvext.backend_instance_id", e.DPRank}
	default:
		p.pin.rank = e.DPRank
	}
	return nil
}

// samePhases tells whether the request names the same worker and rank for both
// phases, as the router's own answers do.
func samePhases(e *nvext.Ext) bool {
	decode := e.DecodeWorkerID
	if !decode.Set {
		decode = e.BackendInstanceID
	}
	return decode.Set && e.PrefillWorkerID == decode && (!e.PrefillDPRank.Set || e.PrefillDPRank == e.DPRank)
}

// only is the one worker that may serve a request.
type only struct {
	worker *worker // nil if others may, too
	rank   nvext.Opt[uint32]
	reason string
}

// narrow finds out which workers the request allows, before any is chosen. The
// error is a *api.Refusal: what the request wants cannot be.
func (rt *route) narrow(r *http.Request) error {
	p := rt.plan
	constrained := p.ext.AllowedWorkerIDs != nil || p.ext.RoutingConstraints.RequiredTaints != nil
	rt.apart = p.apart
	if !p.pin.named && !p.pin.rank.Set && !constrained && p.response == "" && !rt.apart {
		return nil
	}
	ups := rt.upstreams(r)
	if err := rt.errShared(ups); err != nil {
		return err
	}
	if p.pin.named {
		return rt.pinTo(ups)
	}
	if p.pin.rank.Set && !slices.ContainsFunc(rt.table(ups).rows, func(row tableRow) bool { return rt.hasRank(row.worker) }) {
		return rt.badPin("nvext.dp_rank: no worker has the rank %d", p.pin.rank.Value)
	}
	if p.response != "" && rt.returnTo(ups) {
		if !rt.keepsApart(rt.only.worker) {
			return rt.shared("that of the response which the request names")
		}
		return nil
	}
	if constrained && !slices.ContainsFunc(rt.table(ups).rows, func(row tableRow) bool { return rt.permits(row.worker) }) {
		return &api.Refusal{API: p.api, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Param: "nvext", Err: p.errNonePermitted()}
	}
	return nil
}

// pinTo makes the worker that the request names the only one.
func (rt *route) pinTo(ups reverseproxy.UpstreamPool) error {
	pin := &rt.plan.pin
	w := rt.named(ups, pin.worker)
	switch {
	case w == nil:
		return rt.badPin("%s: no worker of this pool has the id %d", pin.field, pin.worker)
	case pin.rank.Set && !rt.hasRank(w):
		return rt.badPin("nvext.dp_rank: worker %d has no rank %d, its ranks are 0 to %d", pin.worker, pin.rank.Value, w.ranks()-1)
	case !pin.rank.Set && w.ranks() > 1:
		// Dynamo's own text (lib/llm/src/kv_router/push_router/selection.rs)
		return rt.badPin("Pinned worker %d requires an explicit dp_rank because it has multiple or unknown DP ranks", pin.worker)
	case !rt.keepsApart(w):
		return rt.shared("that of worker %d, which the request names", w.id)
	case !rt.permits(w):
		return rt.badPin("%s: worker %d is not among those that the request allows: %w", pin.field, pin.worker, rt.plan.errNonePermitted())
	}
	rt.only = only{w, pin.rank, reasonPin}
	return nil
}

func (rt *route) badPin(format string, args ...any) error {
	return &api.Refusal{API: rt.plan.api, Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: fmt.Errorf(format, args...)}
}

// named returns the worker with an id among upstreams, nil if there is none.
func (rt *route) named(ups reverseproxy.UpstreamPool, id uint64) *worker {
	for _, row := range rt.table(ups).rows {
		if row.worker.id == id {
			return row.worker
		}
	}
	return nil
}

// hasRank tells whether a worker has the rank that the request names, if it
// names one.
func (rt *route) hasRank(w *worker) bool {
	rank := rt.plan.pin.rank
	return !rank.Set || int64(rank.Value) < int64(w.ranks())
}

// pinned tells whether the request is of one worker.
func (rt *route) pinned() bool { return rt.only.worker != nil }

// pinnedPosition returns the position of the one target that may serve the request,
// -1 if the policy must choose among several ranks. A session that is bound to another
// target stays bound there.
func (rt *route) pinnedPosition(session kvscore.Target) int {
	if len(rt.scratch.targets) != 1 {
		return -1
	}
	rt.wait.away = rt.bound != 0 && session != rt.scratch.targets[0].Target
	return 0
}

// errNobody says that no worker that may serve the request can be reached.
func (rt *route) errNobody() error {
	if rt.pinned() {
		return rt.only.errUnavailable()
	}
	return errors.New("no worker can be reached; try again later")
}

// incidentNobody is that as a condition that lasts.
func (rt *route) incidentNobody() string {
	if rt.pinned() {
		return incidentPinned
	}
	return errNoWorker.Error()
}

// errUnavailable says why the only worker that may serve the request does not.
func (o *only) errUnavailable() error {
	if o.reason == reasonResponse {
		return fmt.Errorf("worker %d, which keeps the response that the request names, cannot be reached; try again later", o.worker.id)
	}
	return fmt.Errorf("worker %d, which the request names, cannot be reached; try again later", o.worker.id)
}

// incidentPinned is a condition that lasts, as the log and the admin API say it.
const incidentPinned = "a worker that requests name is not available"
