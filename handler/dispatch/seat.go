package dispatch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func (d *Dispatch) see(ups reverseproxy.UpstreamPool) {
	d.offers = d.tables.Offers(d.Pool, ups, d.repl)
	dynamic := d.Proxy.DynamicUpstreams != nil
	d.Pool.See(d.offers, time.Now(), dynamic)
	if dynamic {
		for i := range d.offers.Table.Rows {
			d.Prober.Discovered(d.offers.Table.Rows[i].Worker)
		}
	}
}

// follower is a source of upstreams that knows at once when they change, and never blocks.
type follower interface {
	// Version changes with the upstreams. It is 0 while the source does not know them.
	Version() uint64
}

// Renew implements pool.Chooser.
func (d *Dispatch) Renew() (o pool.Offers, follows bool) {
	source, ok := d.Proxy.DynamicUpstreams.(follower)
	if !ok {
		return d.offers, false
	}
	if v := source.Version(); v != d.version {
		ups, err := d.Proxy.DynamicUpstreams.GetUpstreams(d.plan.HTTP)
		if err != nil {
			return d.offers, false
		}
		d.version = v
		d.see(ups)
	}
	return d.offers, d.version != 0
}

// Seated returns whether a worker was found. Any goroutine may call it.
func (d *Dispatch) Seated() bool { return d.seated.Load() }

// seat finds a seat on a worker, and begins an attempt there.
func (d *Dispatch) seat(ctx context.Context) error {
	want, a := d.Wants(), new(attempt.Attempt)
	want.ID, want.Again = d.plan.ID, d.attempts > 0
	if want.Rest = d.answer != nil; want.Rest && d.Rest != nil && d.Rest.Way != api.WayWhole {
		want.Backups = nil // which may have another model
	}
	if err := d.reserve(ctx, &want, &d.offers, d, a); err != nil {
		return err
	}
	if a.Upstream.Host == nil { // the proxy has not seen it
		a.Upstream.Host = new(reverseproxy.Host)
	}
	d.attempts++
	d.seated.Store(true)
	d.attempt, d.phases = a, nil // at once: End ends it if anything below panics
	a.Worker.Requested(d.plan.Model)
	d.turn.Choose(a.Target)
	d.tried = append(d.tried, a.Worker)
	a.Chosen(d.reasonOf(a.Unpriced, &a.Terms), d.attempts, kvscore.CostUnit(d.policy))
	return nil
}

// reserve takes a seat for an attempt, within the time that the request may wait in the queue.
func (d *Dispatch) reserve(ctx context.Context, want *pool.Wants, o *pool.Offers, by pool.Chooser, a *attempt.Attempt) error {
	want.Patience = time.Duration(d.Pool.Settings.Load().MaxWait) - d.wait.waited
	if d.held.resp != nil { // its client could ask again after the Retry-After
		if wait := attempt.RetryAfter(d.held.resp.Header); wait > 0 {
			want.Patience = min(want.Patience, wait)
		}
	}
	d.wait.most = d.wait.waited + want.Patience
	waited, err := d.Pool.Seat(ctx, want, o, by, &a.Seat)
	d.wait.waited, d.wait.since = d.wait.waited+waited, time.Time{}
	if err == nil {
		a.Call = &d.Call
	}
	return err
}

// endAttempt ends the present attempt with its phases, if there is one. computed: the worker has computed
// the prompt.
func (d *Dispatch) endAttempt(computed bool) {
	a, o := d.attempt, d.answer
	if a == nil || a.Left() {
		return
	}
	var answer []uint64
	if computed && o != nil && !d.Holds() {
		answer = o.Blocks
	}
	if d.phases != nil {
		d.phases.Leave(o != nil && o.attempt == a && o.Whole)
		computed = computed && a.Answers == nil
	}
	a.Leave(computed, answer)
	d.turn.RollBack()
}

// longestRetryAfter bounds what a prediction tells clients.
const longestRetryAfter = 10 * time.Minute

// turnAway records that the operator's limits refuse the request. err is the queue's.
func (d *Dispatch) turnAway(err error) {
	set := d.Pool.Settings.Load()
	e := &api.Refusal{
		API: d.plan.API, Status: http.StatusServiceUnavailable, Code: api.CodeQueueTimeout,
		RetryAfter: max(1, int(min(time.Duration(set.MaxWait), time.Minute)/time.Second)), // by then, all that wait now have left the queue
	}
	var late *pool.LateError
	incident := "requests waited too long, and the queue rejected them"
	reason := turnedAwayTimeout
	all := "all workers are full"
	if len(d.offers.Ups) == 0 {
		all = "there are no workers now"
	}
	switch {
	case errors.Is(err, pool.ErrQueueFull):
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeQueueFull
		e.Err = fmt.Errorf("%s, and %d requests wait, which is the most; try again later", all, set.MaxWaiting)
		incident = "the queue is full, and rejects requests"
		reason = turnedAwayFull
		if c := d.plan.Class; c != nil && c.Background {
			reason = turnedAwayBackground
		}
	case errors.Is(err, pool.ErrWaitedForSession):
		e.Err = fmt.Errorf("the session's worker is full, and had no free slot within %s; try again later", d.wait.most)
	case errors.As(err, &late):
		e.Status, e.Code = http.StatusTooManyRequests, api.CodeLate
		e.Err = fmt.Errorf("%w; try again later", late)
		e.RetryAfter = max(1, int(min(late.After(), longestRetryAfter).Round(time.Second)/time.Second))
		incident = "requests would be late, and are refused"
		reason = turnedAwayLate
		d.promised(promiseRefused)
	default:
		e.Err = fmt.Errorf("%s, and none had a free slot within %s; try again later", all, d.wait.most)
	}
	d.Pool.Raise(time.Now(), incident, e.Err)
	rejectedTotal.WithLabelValues(d.Pool.Name, reason).Inc()
	if late == nil {
		d.Pool.Outcomes.Count(time.Now(), d.plan.ClassName(), e.Code)
	}
	d.wait.turnedAway = e
}

// Choose implements pool.Chooser.
func (d *Dispatch) Choose(ctx context.Context, c *pool.Candidates) pool.Choice {
	switch state := c.Tier.State(); {
	case d.fixed != nil: // whatever it is at
	case state == pool.Fallback:
		d.Pool.Raise(c.At, "only prefill workers are available, and they serve whole requests")
	case state == pool.Draining || state == pool.DrainingMarked:
		d.Pool.Raise(c.At, "only draining workers are left, and the router uses them")
	case state == pool.MarkedDown && len(d.tried) == 0:
		incident := "all workers are marked down, and the router uses them anyway"
		if slices.ContainsFunc(d.offers.Table.Rows, func(row pool.TableRow) bool { return row.Worker.TakesRequests(c.At) }) {
			incident = "all workers of a model are marked down, and the router uses them anyway"
		}
		d.Pool.Raise(c.At, incident, c.Workers[0].Past.LastFailure())
	}
	if d.turn.Find(ctx); d.turn.Pending() && d.fixed == nil && !c.Granted {
		return pool.Choice{Wait: d.turn.Await}
	}
	return d.choice(c)
}

// choice returns how to choose among candidates, once the session is found.
func (rt *route) choice(c *pool.Candidates) pool.Choice {
	choice := pool.Choice{Bound: rt.boundPosition(c), Request: rt.score(c), Policy: rt.policy}
	if bound, _ := rt.turn.BoundTarget(); rt.turn.WaitsIfFull() && rt.fixed == nil { // the turn waits for it
		choice.SessionWorker = fullOf(c, bound)
	}
	return choice
}

// score returns the scheduler's view of the request: the plan's, with the client's preferred taints
// and the target of the session or of its parent. Workers that must load the model cost more.
func (rt *route) score(c *pool.Candidates) *kvscore.Request {
	prefers := rt.plan.Ext.RoutingConstraints.PreferredTaints
	warm := rt.turn.Warm()
	apart, ways := rt.split.Ways(c)
	loads := rt.plan.Model != "" && slices.ContainsFunc(c.Workers, (*worker.Worker).LoadsOnDemand)
	if len(prefers) == 0 && !loads && warm == (kvscore.Target{}) && ways == nil {
		return &rt.plan.Score
	}
	scored := &c.Scored
	*scored = rt.plan.Score // the plan does not change
	scored.BoundTarget, scored.Split, scored.Ways = warm, apart, ways
	if len(prefers) == 0 && !loads {
		return scored
	}
	c.Factors = slices.Grow(c.Factors[:0], len(c.Workers))[:len(c.Workers)]
	scored.Factors = c.Factors
	for i, w := range c.Workers {
		sum := 0.0
		for _, taint := range prefers {
			if slices.Contains(w.Tainted(), taint.Name) {
				sum += float64(taint.Weight)
			}
		}
		scored.Factors[i] = preference(sum) * w.LoadFactor(rt.plan.Model)
	}
	return scored
}

// preference returns Dynamo's factor of a worker's cost by the sum of its preferred taints'
// weights: e repels, 1/e attracts (lib/kv-router/src/protocols.rs,
// preferred_taint_multiplier).
func preference(sum float64) float64 { return math.Exp(-math.Tanh(sum)) }

// boundPosition returns the position of the target that the pin or the session decides on; -1
// if the policy chooses.
func (rt *route) boundPosition(c *pool.Candidates) int {
	bound, priced := rt.turn.BoundTarget()
	isBound := bound != (kvscore.Target{})
	switch {
	case rt.fixed != nil && len(c.Targets) != 1:
		return -1 // the policy chooses among the ranks
	case rt.fixed != nil:
		if isBound && bound != c.Targets[0].Target {
			rt.turn.ServeElsewhereOnce()
		}
		return 0
	case !isBound:
		return -1
	}
	elsewhere := fullOf(c, bound) != nil // for this request only
	if w := rt.offers.Worker(bound.Worker); w != nil && rt.plan.Constrained() {
		want := rt.Wants()
		elsewhere = elsewhere || rt.Pool.Meets(&want, w) != pool.Fits
	}
	if elsewhere {
		rt.turn.ServeElsewhereOnce()
	}
	if priced {
		return -1
	}
	if rt.turn.Crowded() {
		rt.turn.ServeElsewhereOnce()
		return -1
	}
	return slices.IndexFunc(c.Targets, func(t kvscore.TargetRef) bool { return t.Target == bound })
}

// fullOf returns the worker of a target if that is left out only because it is full; nil
// otherwise.
func fullOf(c *pool.Candidates, t kvscore.Target) *worker.Worker {
	i := slices.IndexFunc(c.Full, func(w *worker.Worker) bool { return w.ID == t.Worker })
	if i < 0 {
		return nil
	}
	return c.Full[i]
}

// Waits implements pool.Chooser: no request waits for one that is queued.
func (d *Dispatch) Waits(why string) {
	if d.wait.why = why; d.wait.since.IsZero() {
		d.wait.since = time.Now()
	}
	d.turn.Yield()
}

// Chosen implements pool.Chooser. It logs what degraded the choice. The session stays bound if
// its worker holds the prompt but the policy chose another worker.
func (d *Dispatch) Chosen(c *pool.Candidates, i int, unpriced bool) {
	sel := &c.Sel
	if sel.Fault {
		const incident = "the policy returns invalid workers, and the router takes the least loaded one"
		d.Pool.Raise(c.At, incident)
	}
	if sel.Unknown > 0 {
		d.Pool.Raise(c.At, "the load of some workers is unknown, and the router assumes the median")
	}
	d.remember(c, i, unpriced)
	if c.Workers[i].IsBackup() { // the session comes back to its own workers
		want := d.Wants()
		d.Pool.Wake(&want, d.offers, c.At)
		d.Pool.Raise(c.At, "requests overflow to backup workers")
		d.turn.ServeElsewhereOnce()
		return
	}
	if unpriced {
		return
	}
	if bound, _ := d.turn.BoundTarget(); bound != (kvscore.Target{}) && i != sel.BoundTarget && sel.BoundTargetHolds() {
		d.turn.ServeElsewhereOnce()
	}
	if d.Shadow != nil && d.plan.Request != nil {
		d.Shadow.compare(d, c, i)
	}
}

// NewShadow returns a shadow of the active policy; nil if p is nil.
func NewShadow(p kvscore.Policy, pool string) *shadow {
	if p == nil {
		return nil
	}
	return &shadow{
		policy: p, agreed: shadowTotal.WithLabelValues(pool, "true"), differed: shadowTotal.WithLabelValues(pool, "false"),
		fault: shadowFaults.WithLabelValues(pool),
	}
}

// compare asks the shadow for the choice that the active policy has just made. chosen is the
// position of that.
func (s *shadow) compare(d *Dispatch, c *pool.Candidates, chosen int) {
	sel := c.Sel // and candidates of its own, without the active policy's costs
	c.Shadow = append(c.Shadow[:0], c.Sel.Candidates...)
	sel.Candidates = c.Shadow
	for i := range sel.Candidates {
		sel.Candidates[i].Cost, sel.Candidates[i].Terms = 0, kvscore.Terms{}
	}
	i, panicked := s.ask(&sel)
	switch {
	case panicked != nil || i < 0 || i >= len(c.Shadow):
		s.fault.Inc()
		d.Pool.Raise(d.start, "the shadow policy returns invalid workers")
	case i == chosen:
		s.agreed.Inc()
	default:
		s.differed.Inc()
		if log := d.Logger.Check(zap.DebugLevel, "shadow policy chose another worker"); log != nil {
			a, b := &c.Sel.Candidates[chosen], &c.Shadow[i]
			log.Write(zap.Stringer("target", c.Targets[chosen]), zap.String("upstream", c.Workers[chosen].Dial),
				zap.Float64("cost", a.Cost), zap.Float64("overlap_blocks", a.OverlapBlocks),
				zap.Stringer("shadow_target", c.Targets[i]), zap.String("shadow_upstream", c.Workers[i].Dial),
				zap.Float64("shadow_cost", b.Cost), zap.Float64("shadow_overlap_blocks", b.OverlapBlocks))
		}
	}
}

// ask lets the policy choose, and recovers from its panics: the request does not depend on
// it.
func (s *shadow) ask(sel *kvscore.Selection) (chosen int, panicked any) {
	defer func() { panicked = recover() }()
	return s.policy.Choose(sel), nil
}

// remember has the pool remember the choice of an inference request, so that it can be explained
// later.
func (d *Dispatch) remember(c *pool.Candidates, chosen int, unpriced bool) {
	if d.plan.Request == nil {
		return
	}
	past := observe.PastChoice{
		At: c.At, Request: d.plan.ID, Model: c.Workers[chosen].ModelMetrics(d.plan.Model).Model,
		Reason: d.reasonOf(unpriced, &c.Sel.Candidates[chosen]), Tokens: c.Sel.Tokens,
		Attempt: d.attempts + 1, Waited: d.wait.waited, Why: d.wait.why,
		Class: d.plan.ClassName(), Tenant: strings.Clone(d.plan.Tenant.Name), Candidates: c.Past[:0],
	}
	if name := d.plan.Model; name != past.Model { // the memory of the body may hold it
		const longest = 128
		past.Model = strings.ToValidUTF8(strings.Clone(name[:min(len(name), longest)]), "�")
	}
	if d.Rest != nil {
		past.Rest = d.Rest.Way
	}
	if !d.wait.since.IsZero() {
		past.Waited += c.At.Sub(d.wait.since)
	}
	if !unpriced {
		past.Unit = kvscore.CostUnit(d.policy)
	}
	past.Note(c.Sel.Candidates, func(i int) string { return c.Workers[i].Dial }, chosen)
	d.Pool.Choices.Remember(&past)
	c.Past = past.Candidates
}
