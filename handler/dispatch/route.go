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
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func (s *Dispatcher) routeOf(p *plan.Plan) route {
	rt := route{Dispatcher: s, plan: p, ready: time.Now(), policy: s.Policy}
	if p.Request == nil {
		rt.policy = &passThroughPolicy
	}
	rt.split = split.Request{
		Pool: s.Pool, Plan: p, Policy: rt.policy, Rule: s.Phases, Client: s.Client, FirstToken: time.Duration(s.Timeouts.FirstToken),
		Metrics: s,
	}
	rt.repl, _ = p.HTTP.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return rt
}

// Wants returns the requirements on the next attempt's worker, and the request's place in the
// queue.
func (rt *route) Wants() pool.Wants {
	e := rt.plan.Ext
	ahead := time.Duration(min(e.AgentHints.PriorityJump(), longestHeadStart) * float64(time.Second))
	want := pool.Wants{
		Model: rt.plan.Model, Rank: pool.AnyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: rt.plan.Isolated, API: rt.plan.Name, Kind: worker.KindPlain,
		Session: rt.plan.Session.Opens(), Tried: rt.tried, Beyond: rt.beyond,
		// Dynamo's order (lib/kv-router/src/scheduling/queue.rs)
		Tier: -int(e.AgentHints.StrictPriority.Value), Arrival: rt.ready.Add(-ahead),
		NoTrial: !rt.plan.ShowsHealth, Backups: rt.plan.Backups, Declared: rt.Backups,
		Class: rt.plan.Class, Tenant: rt.plan.Tenant.Hash, TenantName: rt.plan.Tenant.Name,
		TenantWeight: rt.Pool.Quota.Weight(rt.plan.Tenant.Hash),
	}
	switch req := rt.plan.Request; {
	case !rt.plan.TakesSlot:
		want.Kind = worker.KindOther
	case req != nil && req.Stream:
		want.Kind = worker.KindStream
	}
	if target := rt.plan.TTFT; target > 0 {
		want.Deadline = rt.ready.Add(target)
	}
	if !rt.Holds() {
		want.Prompt, want.Answer = rt.plan.Length()
	}
	if len(rt.Proxy.Upstreams) < 2 && rt.Proxy.DynamicUpstreams == nil && rt.plan.Backups == nil {
		want.Model = "" // there is no choice
	}
	rank := rt.plan.Pin.Rank
	if rt.fixed != nil {
		want.Only, rank = rt.fixed.worker, rt.fixed.rank
	}
	if rank.Set {
		want.Rank = int64(rank.Value)
	}
	want.Part = rt.split.Part(&want)
	return want
}

// longestHeadStart bounds what a priority is worth, in seconds.
const longestHeadStart = 1e9

// Offers returns the workers that the proxy offers.
func (rt *route) Offers() pool.Offers { return rt.offers }

// otherLeft returns whether a worker may be available that was not tried.
func (rt *route) otherLeft() bool {
	want := rt.Wants()
	return rt.Pool.Some(&want, rt.offers, func(_ *worker.Worker, v pool.Verdict) bool { return v.Possible() })
}

// Holds returns whether the engine of the worker holds the session's state. Its turns send only
// what is new, so they are no prompts of the cache model, and their counts show nothing of it.
func (rt *route) Holds() bool {
	return rt.plan.Session.Held || rt.plan.Session.Opens() || rt.turn.EngineSession() != ""
}

// passThroughPolicy chooses for requests that are no inference requests.
var passThroughPolicy kvscore.LeastLoad

// reasonOf returns the reason of a choice.
func (rt *route) reasonOf(unpriced bool, c *kvscore.Candidate) string {
	bound, _ := rt.turn.BoundTarget()
	w := rt.offers.Worker(c.Target.Worker)
	switch {
	case rt.fixed != nil:
		return rt.fixed.reason
	case rt.plan.Backups != nil && w != nil && w.IsBackup():
		return ReasonOverflow
	case unpriced || c.Target == bound:
		return ReasonSession
	case c.OverlapBlocks > 0:
		return reasonOverlap
	}
	return reasonLoad
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

// enter enters the request's session, and finds before the first choice which workers the request allows. A dry
// one changes nothing. The error is a *api.Refusal if none can be chosen.
func (rt *route) enter(dry bool) error {
	p := rt.plan
	if err := rt.Sessions.Enter(p.HTTP.Context(), &rt.turn, p, dry); err != nil {
		return err
	}
	if rt.Holds() { // the prompt is only a part of what the engine has
		p.Score.Blocks, p.Score.Past, p.Score.Identities = nil, 0, nil
	}
	pins, sole := p.PinsPrefill()
	at, held := rt.turn.Held()
	narrowed := p.Pin.Named || p.Pin.Rank.Set || p.Constrained() || p.Response != "" || p.Isolated || p.Session.Opens()
	if pins = pins && !sole; !pins && !held && !narrowed {
		return nil
	}
	if rt.offers.Table == nil {
		rt.offers = rt.tables.Offers(rt.Pool, rt.upstreams(p.HTTP), rt.repl)
	}
	if pins {
		if err := rt.split.Pin(); err != nil {
			return badPin(p, "%w", err)
		}
	}
	if held {
		if err := rt.fixAt(at); err != nil || rt.fixed != nil {
			return err
		}
	}
	if !narrowed {
		return nil
	}
	want := rt.Wants()
	met := pool.NotNamed // by the closest worker
	if len(rt.offers.Ups) == 0 {
		met = pool.Fits
	}
	for _, row := range rt.offers.Table.Rows {
		if !row.Worker.IsBackup() {
			met = min(met, rt.Pool.Meets(&want, row.Worker))
		}
	}
	switch {
	case met == pool.SharesCache:
		return shared(p, "no engine")
	case p.Session.Opens() && met != pool.Fits:
		return turn.NotOpened(p, http.StatusBadRequest,
			errors.New("no engine that the request allows can hold a session in this API"))
	case p.Pin.Named:
		return rt.pinTo(&want)
	case met == pool.NoRank:
		return badPin(p, "nvext.dp_rank: no worker has the rank %d", p.Pin.Rank.Value)
	case p.Response != "" && rt.returnTo():
		if !rt.Pool.Isolates(&want, rt.fixed.worker) {
			return shared(p, "not the engine with the named response")
		}
	case met != pool.Fits:
		return refusal(p, http.StatusServiceUnavailable, api.CodeNoWorker, "nvext", p.ErrNonePermitted())
	}
	return nil
}

func (rt *route) pinTo(want *pool.Wants) error {
	p, pin := rt.plan, &rt.plan.Pin
	w := rt.offers.Worker(pin.Worker)
	switch {
	case w == nil || w.IsBackup(): // which no client can name
		return badPin(p, "%s: no worker of this pool has the id %d", pin.Field, pin.Worker)
	case pin.Rank.Set && int64(pin.Rank.Value) >= int64(w.Ranks()):
		return badPin(p, "nvext.dp_rank: worker %d has no rank %d, its ranks are 0 to %d",
			pin.Worker, pin.Rank.Value, w.Ranks()-1)
	case !pin.Rank.Set && w.Ranks() > 1:
		// Dynamo's own text (lib/llm/src/kv_router/push_router/selection.rs)
		return badPin(p, "Pinned worker %d requires an explicit dp_rank because it has multiple or unknown DP ranks",
			pin.Worker)
	case !rt.Pool.Isolates(want, w):
		return shared(p, "not the engine of the named worker %d", w.ID)
	case rt.Pool.Meets(want, w) != pool.Fits:
		return badPin(p, "%s: worker %d is not one that the request allows: %w",
			pin.Field, pin.Worker, p.ErrNonePermitted())
	}
	rt.fixed = &fixed{worker: w, rank: pin.Rank, reason: ReasonPin}
	return nil
}

// fixAt makes the target whose engine holds the session the only one. A turn that opens the
// session again may go elsewhere if that worker cannot be used, and a last one if the client
// says so.
func (rt *route) fixAt(at kvscore.Target) error {
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
			return badPin(p, "nvext: the session is on worker %d, rank %d, whose engine holds it", w.ID, at.Rank)
		}
		rt.turn.Leave()
		return nil
	}
	if want := rt.Wants(); !rt.Pool.Isolates(&want, w) {
		return shared(p, "not the engine with the session")
	}
	rt.fixed = &fixed{worker: w, rank: nvext.Some(at.Rank), reason: ReasonSession}
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
	rt.fixed = &fixed{worker: w, rank: rank, reason: ReasonResponse}
	return true
}

func refusal(p *plan.Plan, status int, code, member string, err error) error {
	return &api.Refusal{API: plan.OrUnplanned(p.API), Status: status, Code: code, Param: member, Err: err}
}

func badPin(p *plan.Plan, format string, args ...any) error {
	return refusal(p, http.StatusBadRequest, api.CodePin, "nvext", fmt.Errorf(format, args...))
}

func shared(p *plan.Plan, format string, args ...any) error {
	where := "this path"
	if p.API != nil {
		where = "the API " + p.API.Name()
	}
	return refusal(p, http.StatusBadRequest, api.CodeShared, "cache_salt", fmt.Errorf(
		"the request has a salt (cache_salt or X-Tenant-Id), and %s is known to keep its cache apart in %s",
		fmt.Sprintf(format, args...), where))
}

// errNobody says why no worker can serve the request.
func (rt *route) errNobody() error {
	if t, want := rt.offers.Table, rt.Wants(); t != nil && t.Split &&
		!rt.Pool.Some(&want, rt.offers, func(_ *worker.Worker, v pool.Verdict) bool { return v <= pool.Tried }) &&
		rt.Pool.Some(&want, rt.offers, func(_ *worker.Worker, v pool.Verdict) bool { return v == pool.OtherRole }) {
		return rt.split.ErrWhole()
	}
	if rt.fixed == nil {
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
