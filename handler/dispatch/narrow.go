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

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
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

// lookUp looks up the upstreams that the proxy would offer, unless they are known.
func (rt *route) lookUp() {
	if rt.offers.Table == nil {
		rt.offers = rt.tables.Offers(rt.Pool, rt.upstreams(), rt.repl)
	}
}

// closest returns the best verdict on an offered worker: Fits if one may serve the request, else
// what keeps it from that. It returns Fits if no worker is offered.
func (rt *route) closest(want *pool.Wants) pool.Verdict {
	if len(rt.offers.Ups) == 0 {
		return pool.Fits
	}
	closest := pool.NotNamed
	for i := range rt.offers.Table.Rows {
		closest = min(closest, rt.Pool.Meets(want, rt.offers.Table.Rows[i].Worker))
	}
	return closest
}

// pinTo makes the worker that the request names the only one.
func (rt *route) pinTo(want *pool.Wants) error {
	pin := &rt.plan.Pin
	w := rt.offers.Worker(pin.Worker)
	switch {
	case w == nil:
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

func (rt *route) badPin(format string, args ...any) error {
	return rt.refuse(http.StatusBadRequest, api.CodePin, "nvext", fmt.Errorf(format, args...))
}

func (rt *route) refuse(status int, code, member string, err error) error {
	return &api.Refusal{API: plan.OrUnplanned(rt.plan.API), Status: status, Code: code, Param: member, Err: err}
}

// shared returns the refusal of a request that would share a cache.
func (rt *route) shared(format string, args ...any) error {
	where := "this path"
	if a := rt.plan.API; a != nil {
		where = "the API " + a.Name()
	}
	return rt.refuse(http.StatusBadRequest, api.CodeShared, "cache_salt", fmt.Errorf(
		"the request has a salt (cache_salt or X-Tenant-Id), and %s is known to keep its cache apart in %s",
		fmt.Sprintf(format, args...), where))
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

// pinned returns whether only one worker may serve the request.
func (rt *route) pinned() bool { return rt.fixed.worker != nil }

// onlyLegs returns whether the available workers could serve a leg of the request, but not all
// of it.
func (rt *route) onlyLegs() bool {
	if rt.offers.Table == nil || !rt.offers.Table.Apart {
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

// errNobody returns the error if no allowed worker can be reached.
func (rt *route) errNobody() error {
	if rt.onlyLegs() {
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

// upstreams returns those that the proxy would offer for a request.
func (rt *route) upstreams() reverseproxy.UpstreamPool {
	if source := rt.Proxy.DynamicUpstreams; source != nil {
		if ups, err := source.GetUpstreams(rt.plan.HTTP); err == nil {
			return ups
		}
	}
	return rt.Proxy.Upstreams
}

// checkModel refuses an inference request for a model that no worker serves; nil otherwise.
func (s *Dispatcher) checkModel(p *plan.Plan) *api.Refusal {
	static := s.Proxy.DynamicUpstreams == nil && len(s.Proxy.Upstreams) > 0
	if p.Request == nil || p.Model == "" || !static || !s.Pool.NoneServes(s.Proxy.Upstreams, p.Model) {
		return nil
	}
	return &api.Refusal{API: p.API, Status: http.StatusNotFound, Code: api.CodeNoModel, Param: "model", Err: fmt.Errorf(
		"no worker serves the model %q; GET /v1/models lists the served models", p.Model)}
}
