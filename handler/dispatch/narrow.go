package dispatch

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// narrow finds before the first choice which workers the request allows. The error is a
// *api.Refusal if none can be chosen.
func (rt *route) narrow() error {
	p := rt.plan
	if pins, sole := p.PinsPrefill(); pins && !sole {
		rt.lookUp()
		if err := rt.split.Pin(); err != nil {
			return rt.badPin("%w", err)
		}
	}
	if at, held := rt.turn.Held(); held {
		if err := rt.stayAt(at); err != nil || rt.pinned() {
			return err
		}
	}
	if !p.Pin.Named && !p.Pin.Rank.Set && !p.Constrained() && p.Response == "" && !p.Isolated && !p.Session.Opens() {
		return nil
	}
	rt.lookUp()
	want := rt.Wants()
	met := rt.closest(&want)
	switch {
	case met == pool.SharesCache:
		return rt.shared("no engine")
	case p.Session.Opens() && met != pool.Fits:
		return turn.NotOpened(p, http.StatusBadRequest,
			errors.New("no engine that the request allows can hold a session in this API"))
	case p.Pin.Named:
		return rt.pinTo(&want)
	case met == pool.NoRank:
		return rt.badPin("nvext.dp_rank: no worker has the rank %d", p.Pin.Rank.Value)
	case p.Response != "" && rt.returnTo():
		if !rt.Pool.Isolates(&want, rt.fixed.worker) {
			return rt.shared("not the engine with the named response")
		}
	case met != pool.Fits:
		return rt.refuse(http.StatusServiceUnavailable, api.CodeNoWorker, "nvext", p.ErrNonePermitted())
	}
	return nil
}

func (rt *route) pinTo(want *pool.Wants) error {
	pin := &rt.plan.Pin
	w := rt.offers.Worker(pin.Worker)
	switch {
	case w == nil || w.IsBackup(): // which no client can name
		return rt.badPin("%s: no worker of this pool has the id %d", pin.Field, pin.Worker)
	case pin.Rank.Set && int64(pin.Rank.Value) >= int64(w.Ranks()):
		return rt.badPin("nvext.dp_rank: worker %d has no rank %d, its ranks are 0 to %d",
			pin.Worker, pin.Rank.Value, w.Ranks()-1)
	case !pin.Rank.Set && w.Ranks() > 1:
		// Dynamo's own text (lib/llm/src/kv_router/push_router/selection.rs)
		return rt.badPin("Pinned worker %d requires an explicit dp_rank because it has multiple or unknown DP ranks",
			pin.Worker)
	case !rt.Pool.Isolates(want, w):
		return rt.shared("not the engine of the named worker %d", w.ID)
	case rt.Pool.Meets(want, w) != pool.Fits:
		return rt.badPin("%s: worker %d is not one that the request allows: %w",
			pin.Field, pin.Worker, rt.plan.ErrNonePermitted())
	}
	rt.fixed = fixed{worker: w, rank: pin.Rank, reason: ReasonPin}
	return nil
}

// stayAt makes the target whose engine holds the session the only one. A turn that opens the
// session again may go elsewhere if that worker cannot be used, and a last one if the client
// says so.
func (rt *route) stayAt(at kvscore.Target) error {
	rt.lookUp()
	p, w := rt.plan, rt.offers.Worker(at.Worker)
	switch {
	case p.Session.Opens() && (w == nil || !w.TakesRequests(rt.ready)):
		rt.turn.Leave()
		return nil
	case w == nil && rt.Pool.IsNowUpstream(at.Worker):
		return &api.Refusal{
			API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, RetryAfter: 1,
			Err: fmt.Errorf("worker %d, whose engine holds the session, is not offered now; try again later", at.Worker),
		}
	case w == nil:
		return rt.turn.Gone()
	}
	if e := w.Engine(); !e.HoldsSessions(p.Name) {
		return turn.NotOpened(p, http.StatusBadRequest,
			fmt.Errorf("the engine of worker %d holds the session, but not in the API %s", w.ID, p.Name))
	}
	if p.Pin.Named && p.Pin.Worker != w.ID || p.Pin.Rank.Set && p.Pin.Rank.Value != at.Rank {
		if !p.Session.Final {
			return rt.badPin("nvext: the session is on worker %d, rank %d, whose engine holds it", w.ID, at.Rank)
		}
		rt.turn.Leave()
		return nil
	}
	if want := rt.Wants(); !rt.Pool.Isolates(&want, w) {
		return rt.shared("not the engine with the session")
	}
	rt.fixed = fixed{worker: w, rank: nvext.Some(at.Rank), reason: ReasonSession}
	return nil
}

// returnTo makes the worker that keeps the named response the only one. It returns whether
// that is still an upstream. If the worker lost the rank, any of its ranks may serve the
// request.
func (rt *route) returnTo() bool {
	t, ok := rt.turn.ResponseAt()
	if !ok {
		return false
	}
	w := rt.offers.Worker(t.Worker)
	if w == nil {
		return false // it is gone, and what it kept
	}
	rank := nvext.Some(t.Rank)
	rank.Set = int64(t.Rank) < int64(w.Ranks())
	rt.fixed = fixed{worker: w, rank: rank, reason: ReasonResponse}
	return true
}

func (rt *route) badPin(format string, args ...any) error {
	return rt.refuse(http.StatusBadRequest, api.CodePin, "nvext", fmt.Errorf(format, args...))
}

func (rt *route) shared(format string, args ...any) error {
	where := "this path"
	if a := rt.plan.API; a != nil {
		where = "the API " + a.Name()
	}
	return rt.refuse(http.StatusBadRequest, api.CodeShared, "cache_salt", fmt.Errorf(
		"the request has a salt (cache_salt or X-Tenant-Id), and %s is known to keep its cache apart in %s",
		fmt.Sprintf(format, args...), where))
}

// onlyPhases returns whether the available workers could serve a phase of the request, but not all
// of it.
func (rt *route) onlyPhases() bool {
	if rt.offers.Table == nil || !rt.offers.Table.Split {
		return false
	}
	want, found := rt.Wants(), false
	for _, v := range rt.Pool.Judge(&want, rt.offers, time.Now()) {
		if v.Possible() || v == pool.Tried {
			return false
		}
		found = found || v == pool.OtherRole
	}
	return found
}

func (rt *route) errNobody() error {
	if rt.onlyPhases() {
		return rt.split.ErrWhole()
	}
	if !rt.pinned() {
		return errors.New("no worker can be reached; try again later")
	}
	which := "which the request names"
	switch rt.fixed.reason {
	case ReasonSession:
		which = "whose engine holds the session"
	case ReasonResponse:
		which = "which keeps what the request names"
	}
	return fmt.Errorf("worker %d, %s, cannot be reached; try again later", rt.fixed.worker.ID, which)
}

// checkModel refuses an inference request for a model that no worker serves; nil otherwise.
func (s *Dispatcher) checkModel(p *plan.Plan) *api.Refusal {
	static := s.Proxy.DynamicUpstreams == nil && len(s.Proxy.Upstreams) > 0
	if p.Request == nil || p.Model == "" || !static || !s.Pool.NoneServes(s.Proxy.Upstreams, p.Model) {
		return nil
	}
	return &api.Refusal{API: p.API, Status: http.StatusNotFound, Code: api.CodeNoModel, Param: "model", Err: fmt.Errorf(
		"no worker serves the model %q; GET /v1/models lists the served models", p.Named())}
}
