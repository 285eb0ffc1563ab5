package dispatch

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// only is the one worker that may serve a request.
type only struct {
	worker *pool.Worker // nil if others may, too
	rank   nvext.Opt[uint32]
	reason string
}

// narrow evaluates before the first choice which workers the request allows. The error
// is a *api.Refusal if no worker can be chosen.
func (rt *Dispatch) narrow(r *http.Request) error {
	p := rt.plan
	rt.apart = p.Isolated
	if !p.Pin.Named && !p.Pin.Rank.Set && !p.Constrained() && p.Response == "" && !rt.apart {
		return nil
	}
	ups := rt.upstreams(r)
	if rt.apart && len(ups) > 0 && !rt.someWorker(ups, rt.keepsApart) {
		return rt.shared("that of any worker")
	}
	if p.Pin.Named {
		return rt.pinTo(ups)
	}
	if p.Pin.Rank.Set && !rt.someWorker(ups, rt.hasRank) {
		return rt.badPin("nvext.dp_rank: no worker has the rank %d", p.Pin.Rank.Value)
	}
	if p.Response != "" && rt.returnTo(ups) {
		if !rt.keepsApart(rt.only.worker) {
			return rt.shared("that of the response which the request names")
		}
		return nil
	}
	if p.Constrained() && !rt.someWorker(ups, rt.permits) {
		return &api.Refusal{API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Param: "nvext", Err: p.ErrNonePermitted()}
	}
	return nil
}

// someWorker returns whether a condition holds for a worker among upstreams.
func (rt *Dispatch) someWorker(ups reverseproxy.UpstreamPool, holds func(*pool.Worker) bool) bool {
	return slices.ContainsFunc(rt.table(ups).Rows, func(row pool.TableRow) bool { return holds(row.Worker) })
}

// pinTo makes the worker that the request names the only one.
func (rt *Dispatch) pinTo(ups reverseproxy.UpstreamPool) error {
	pin := &rt.plan.Pin
	w := rt.named(ups, pin.Worker)
	switch {
	case w == nil:
		return rt.badPin("%s: no worker of this pool has the id %d", pin.Field, pin.Worker)
	case pin.Rank.Set && !rt.hasRank(w):
		return rt.badPin("nvext.dp_rank: worker %d has no rank %d, its ranks are 0 to %d", pin.Worker, pin.Rank.Value, w.Ranks()-1)
	case !pin.Rank.Set && w.Ranks() > 1:
		// Dynamo's own text (lib/llm/src/kv_router/push_router/selection.rs)
		return rt.badPin("Pinned worker %d requires an explicit dp_rank because it has multiple or unknown DP ranks", pin.Worker)
	case !rt.keepsApart(w):
		return rt.shared("that of worker %d, which the request names", w.ID)
	case !rt.permits(w):
		return rt.badPin("%s: worker %d is not among those that the request allows: %w", pin.Field, pin.Worker, rt.plan.ErrNonePermitted())
	}
	rt.only = only{w, pin.Rank, ReasonPin}
	return nil
}

// badPin returns the refusal of a pin that no worker can serve.
func (rt *Dispatch) badPin(format string, args ...any) error {
	return &api.Refusal{API: rt.plan.API, Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: fmt.Errorf(format, args...)}
}

// keepsApart returns whether the worker's engine isolates the request's cache, if that
// is needed.
func (rt *Dispatch) keepsApart(w *pool.Worker) bool {
	want := rt.wants()
	return rt.Pool.Isolates(&want, w)
}

// shared returns the error of a request that would share a cache.
func (rt *Dispatch) shared(format string, args ...any) error {
	where := "this path"
	if a := rt.plan.API; a != nil {
		where = "the API " + a.Name()
	}
	return &api.Refusal{API: plan.OrUnplanned(rt.plan.API), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"the request has a salt (cache_salt, or X-Tenant-Id), and no engine is known to keep its cache apart in %s: not %s", where, fmt.Sprintf(format, args...))}
}

// returnTo makes the worker that keeps the named response the only one, and tells
// whether that worker is known and still an upstream. If it no longer has the rank,
// any of its ranks may serve the request.
func (rt *Dispatch) returnTo(ups reverseproxy.UpstreamPool) bool {
	t, ok := rt.Pool.Responses.Find(rt.plan.Response, !rt.dry)
	if !ok {
		return false
	}
	w := rt.named(ups, t.Worker)
	if w == nil {
		return false // it is gone, and what it kept
	}
	rank := nvext.Some(t.Rank)
	rank.Set = int64(t.Rank) < int64(w.Ranks())
	rt.only = only{w, rank, ReasonResponse}
	return true
}

// named returns the worker with an id among upstreams, nil if there is none.
func (rt *Dispatch) named(ups reverseproxy.UpstreamPool, id uint64) *pool.Worker {
	for _, row := range rt.table(ups).Rows {
		if row.Worker.ID == id {
			return row.Worker
		}
	}
	return nil
}

// hasRank returns whether a worker has the rank that the request names, if it names one.
func (rt *Dispatch) hasRank(w *pool.Worker) bool {
	rank := rt.plan.Pin.Rank
	return !rank.Set || int64(rank.Value) < int64(w.Ranks())
}

// pinned returns whether only one worker may serve the request.
func (rt *Dispatch) pinned() bool { return rt.only.worker != nil }

// pinnedPosition returns the position of the one target that may serve the request,
// -1 if the policy must choose among several ranks. A session that is bound to another
// target stays bound there.
func (rt *Dispatch) pinnedPosition(session kvscore.Target) int {
	if len(rt.scratch.Targets) != 1 {
		return -1
	}
	rt.wait.away = rt.bound != 0 && session != rt.scratch.Targets[0].Target
	return 0
}

// errNobody returns the error of a request whose workers cannot be reached.
func (rt *Dispatch) errNobody() error {
	if rt.pinned() {
		return rt.only.errUnavailable()
	}
	return errors.New("no worker can be reached; try again later")
}

// incidentNobody returns that as a condition that lasts.
func (rt *Dispatch) incidentNobody() string {
	if rt.pinned() {
		return incidentPinned
	}
	return errNoWorker.Error()
}

// errUnavailable returns why the only worker that may serve the request does not.
func (o *only) errUnavailable() error {
	if o.reason == ReasonResponse {
		return fmt.Errorf("worker %d, which keeps the response that the request names, cannot be reached; try again later", o.worker.ID)
	}
	return fmt.Errorf("worker %d, which the request names, cannot be reached; try again later", o.worker.ID)
}

// incidentPinned is a condition that lasts, as the log and the admin API say it.
const incidentPinned = "a worker that requests name is not available"

// permits returns whether the client's constraints allow a worker.
func (rt *Dispatch) permits(w *pool.Worker) bool {
	want := rt.wants()
	return rt.Pool.Permits(&want, w)
}

// score returns what the scheduler is told of the request: the plan's, the client's
// preferences among the targets, and the session's target, which boundPosition has looked
// up.
func (rt *Dispatch) score() *kvscore.Request {
	prefers, home := rt.plan.Ext.RoutingConstraints.PreferredTaints, rt.homeTarget()
	if len(prefers) == 0 && home == (kvscore.Target{}) {
		return &rt.plan.Score
	}
	scored := &rt.scratch.Scored
	*scored = rt.plan.Score // the plan does not change
	scored.Home = home
	if len(prefers) == 0 {
		return scored
	}
	rt.scratch.Factors = slices.Grow(rt.scratch.Factors[:0], len(rt.scratch.Workers))[:len(rt.scratch.Workers)]
	scored.Factors = rt.scratch.Factors
	for i, w := range rt.scratch.Workers {
		sum := 0.0
		for _, taint := range prefers {
			if slices.Contains(w.Tainted(), taint.Name) {
				sum += float64(taint.Weight)
			}
		}
		scored.Factors[i] = preference(sum)
	}
	return scored
}

// preference returns Dynamo's factor of a worker's cost, by the sum of its preferred
// taints' weights (lib/kv-router/src/protocols.rs, preferred_taint_multiplier): from e,
// which repels, to 1/e, which attracts.
func preference(sum float64) float64 { return math.Exp(-math.Tanh(sum)) }
