package dispatch

import (
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// only is the one worker that may serve a request.
type only struct {
	worker *pool.Worker // nil if others may, too
	rank   nvext.Opt[uint32]
	reason string
}

// narrow finds before the first choice which workers the request allows. The error is a
// *api.Refusal if none can be chosen.
func (d *Dispatch) narrow(r *http.Request) error {
	p := d.plan
	d.apart = p.Isolated
	if at, held := d.turn.Held(); held {
		if err := d.stayAt(r, at); err != nil || d.pinned() {
			return err
		}
	}
	if !p.Pin.Named && !p.Pin.Rank.Set && !p.Constrained() && p.Response == "" && !d.apart && !p.Session.Opens() {
		return nil
	}
	ups := d.upstreams(r)
	if d.apart && len(ups) > 0 && !d.someWorker(ups, d.keepsApart) {
		return d.shared("no engine")
	}
	if p.Session.Opens() && len(ups) > 0 && !d.someWorker(ups, d.permits) {
		return turn.NotOpened(p, http.StatusBadRequest, errors.New("no engine that the request allows can hold a session in this API"))
	}
	if p.Pin.Named {
		return d.pinTo(ups)
	}
	if p.Pin.Rank.Set && !d.someWorker(ups, d.hasRank) {
		return d.badPin("nvext.dp_rank: no worker has the rank %d", p.Pin.Rank.Value)
	}
	if p.Response != "" && d.returnTo(ups) {
		if !d.keepsApart(d.only.worker) {
			return d.shared("not the engine with the named response")
		}
		return nil
	}
	if p.Constrained() && !d.someWorker(ups, d.permits) {
		return &api.Refusal{API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, Param: "nvext", Err: p.ErrNonePermitted()}
	}
	return nil
}

// someWorker returns whether a condition holds for a worker among upstreams.
func (d *Dispatch) someWorker(ups reverseproxy.UpstreamPool, holds func(*pool.Worker) bool) bool {
	return slices.ContainsFunc(d.table(ups).Rows, func(row pool.TableRow) bool { return holds(row.Worker) })
}

// pinTo makes the worker that the request names the only one.
func (d *Dispatch) pinTo(ups reverseproxy.UpstreamPool) error {
	pin := &d.plan.Pin
	w := d.named(ups, pin.Worker)
	switch {
	case w == nil:
		return d.badPin("%s: no worker of this pool has the id %d", pin.Field, pin.Worker)
	case !d.hasRank(w):
		return d.badPin("nvext.dp_rank: worker %d has no rank %d, its ranks are 0 to %d", pin.Worker, pin.Rank.Value, w.Ranks()-1)
	case !pin.Rank.Set && w.Ranks() > 1:
		// Dynamo's own text (lib/llm/src/kv_router/push_router/selection.rs)
		return d.badPin("Pinned worker %d requires an explicit dp_rank because it has multiple or unknown DP ranks", pin.Worker)
	case !d.keepsApart(w):
		return d.shared("not the engine of the named worker %d", w.ID)
	case !d.permits(w):
		return d.badPin("%s: worker %d is not one that the request allows: %w", pin.Field, pin.Worker, d.plan.ErrNonePermitted())
	}
	d.only = only{w, pin.Rank, ReasonPin}
	return nil
}

func (d *Dispatch) badPin(format string, args ...any) error {
	return &api.Refusal{API: d.plan.API, Status: http.StatusBadRequest, Code: api.CodePin, Param: "nvext", Err: fmt.Errorf(format, args...)}
}

// keepsApart returns whether the worker's engine isolates the request's cache, if that is
// needed.
func (d *Dispatch) keepsApart(w *pool.Worker) bool {
	want := d.wants()
	return d.Pool.Isolates(&want, w)
}

// shared returns the refusal of a request that would share a cache.
func (d *Dispatch) shared(format string, args ...any) error {
	where := "this path"
	if a := d.plan.API; a != nil {
		where = "the API " + a.Name()
	}
	return &api.Refusal{API: plan.OrUnplanned(d.plan.API), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"the request has a salt (cache_salt or X-Tenant-Id), and %s is known to keep its cache apart in %s", fmt.Sprintf(format, args...), where)}
}

// returnTo makes the worker that keeps the named response the only one. It returns whether
// that is still an upstream. If the worker lost the rank, any of its ranks may serve the
// request.
func (d *Dispatch) returnTo(ups reverseproxy.UpstreamPool) bool {
	t, ok := d.Pool.Responses.Find(d.plan.Response, !d.dry)
	if !ok {
		return false
	}
	w := d.named(ups, t.Worker)
	if w == nil {
		return false // it is gone, and what it kept
	}
	rank := nvext.Some(t.Rank)
	rank.Set = int64(t.Rank) < int64(w.Ranks())
	d.only = only{w, rank, ReasonResponse}
	return true
}

// named returns the worker with an id among upstreams, nil if there is none.
func (d *Dispatch) named(ups reverseproxy.UpstreamPool, id uint64) *pool.Worker {
	rows := d.table(ups).Rows
	if i := slices.IndexFunc(rows, func(row pool.TableRow) bool { return row.Worker.ID == id }); i >= 0 {
		return rows[i].Worker
	}
	return nil
}

func (d *Dispatch) hasRank(w *pool.Worker) bool {
	rank := d.plan.Pin.Rank
	return !rank.Set || int64(rank.Value) < int64(w.Ranks())
}

// pinned returns whether only one worker may serve the request.
func (d *Dispatch) pinned() bool { return d.only.worker != nil }

// errNobody returns the error if no allowed worker can be reached.
func (d *Dispatch) errNobody() error {
	switch {
	case !d.pinned():
		return errors.New("no worker can be reached; try again later")
	case d.only.reason == ReasonSession:
		return fmt.Errorf("worker %d, whose engine holds the session, cannot be reached; try again later", d.only.worker.ID)
	case d.only.reason == ReasonResponse:
		return fmt.Errorf("worker %d, which keeps the response that the request names, cannot be reached; try again later", d.only.worker.ID)
	}
	return fmt.Errorf("worker %d, which the request names, cannot be reached; try again later", d.only.worker.ID)
}

// permits returns whether the client's constraints allow a worker.
func (d *Dispatch) permits(w *pool.Worker) bool {
	want := d.wants()
	return d.Pool.Permits(&want, w)
}

// upstreams returns those that the proxy would offer for a request.
func (s *Dispatcher) upstreams(r *http.Request) reverseproxy.UpstreamPool {
	if source := s.Proxy.DynamicUpstreams; source != nil {
		if ups, err := source.GetUpstreams(r); err == nil {
			return ups
		}
	}
	return s.Proxy.Upstreams
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
