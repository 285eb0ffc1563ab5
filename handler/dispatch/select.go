package dispatch

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// table returns the table of a list of upstreams. A dry dispatch keeps its own: that may have
// workers that the pool does not know.
func (d *Dispatch) table(list reverseproxy.UpstreamPool) *pool.Table {
	if d.dryTable != nil && d.dryTable.IsOf(list) {
		return d.dryTable
	}
	t := d.lastTable.Load()
	if t == nil || t.Layout != d.Pool.Layout.Load() || !t.IsOf(list) {
		var lasting bool
		if t, lasting = d.Pool.NewTable(list, d.repl, d.dry); lasting && !d.dry {
			d.lastTable.Store(t)
		}
	}
	if d.dry {
		d.dryTable = t
	}
	return t
}

// withoutScratch calls a function that waits. Thousands of requests may wait, so it returns
// the scratch meanwhile. The candidates are then lost.
func (d *Dispatch) withoutScratch(ctx context.Context, wait func(context.Context) bool) bool {
	d.returnScratch()
	defer d.takeScratch()
	return wait(ctx)
}

func (d *Dispatch) takeScratch() { d.scratch = d.Pool.TakeScratch() }

func (d *Dispatch) returnScratch() {
	d.Pool.ReturnScratch(d.scratch)
	d.scratch = nil
}

// gather gathers the targets of the next attempt.
func (d *Dispatch) gather(offered reverseproxy.UpstreamPool, t time.Time) (used pool.Resort, found bool) {
	tab := d.table(offered)
	if !d.dry {
		d.markSeen(tab, t.Unix())
	}
	want := d.wants()
	d.model = pool.ModelAmong(tab.Rows, want.Model)
	return d.Pool.Gather(d.scratch, &want, d.model, pool.Offers{Ups: offered, Table: tab}, d.wait.granted, t)
}

// markSeen records in which second the workers were upstreams. For a static list, one request
// a second does it.
func (d *Dispatch) markSeen(tab *pool.Table, second int64) {
	dynamic := d.Proxy.DynamicUpstreams != nil
	if tab.Seen.Swap(second) == second && !dynamic {
		return
	}
	for i := range tab.Rows {
		w := tab.Rows[i].Worker
		if w.Seen.Load() != second { // all processors share what is only read
			w.Seen.Store(second)
		}
		if dynamic {
			d.Probes.Discovered(w)
		}
	}
}

// wants returns the requirements on the next attempt's worker.
func (d *Dispatch) wants() pool.Wants {
	e := d.plan.Ext
	tier, arrival := d.precedence()
	want := pool.Wants{
		Model: d.plan.Model, Only: cmp.Or(d.only.worker, d.wait.home), Rank: pool.AnyRank, Workers: e.AllowedWorkerIDs,
		Taints: e.RoutingConstraints.RequiredTaints, Isolated: d.apart, API: d.plan.Name,
		Session: d.plan.Session.Opens(), Tried: d.tried, Slot: d.plan.Computes, Tier: tier, Arrival: arrival,
	}
	if len(d.Proxy.Upstreams) < 2 && d.Proxy.DynamicUpstreams == nil {
		want.Model = "" // there is no choice
	}
	rank := d.plan.Pin.Rank
	if d.only.worker != nil {
		rank = d.only.rank
	}
	if rank.Set {
		want.Rank = int64(rank.Value)
	}
	return want
}

func (d *Dispatch) offers() pool.Offers {
	return pool.Offers{Ups: d.offered, Table: d.table(d.offered)}
}

// longestHeadStart bounds what a priority is worth, in seconds.
const longestHeadStart = 1e9

// precedence returns the request's place in the queue as Dynamo's
// (lib/kv-router/src/scheduling/queue.rs): a tier by strict priority, then arrival less the
// priority's seconds.
func (d *Dispatch) precedence() (tier int, arrival time.Time) {
	hints := &d.plan.Ext.AgentHints
	jump := min(hints.PriorityJump(), longestHeadStart)
	return -int(hints.StrictPriority.Value), d.ready.Add(-time.Duration(jump * float64(time.Second)))
}

// Selector is the proxy's selection policy. The choice itself is the dispatch's.
type Selector struct{}

func (Selector) Select(offered reverseproxy.UpstreamPool, r *http.Request, _ http.ResponseWriter) *reverseproxy.Upstream {
	if d := dispatchOf(r.Context()); d != nil {
		return d.Select(r.Context(), offered)
	}
	return nil
}

// Select selects and books the upstream of the next attempt. If no worker can serve the
// request, it returns the upstream of exhaust: without one, the proxy would not call RoundTrip,
// which answers the client. It returns nil if the proxy must ask again later.
func (d *Dispatch) Select(ctx context.Context, offered reverseproxy.UpstreamPool) *reverseproxy.Upstream {
	d.endAttempt(false)
	d.use.Yield() // the attempt has not bound the session
	d.takeScratch()
	defer d.returnScratch()
	d.offered, d.retryWanted, d.answer, d.waited, d.wait.homeless = offered, false, nil, false, false
	for {
		t := time.Now()
		found := d.candidates(d.offered, t)
		if !found && d.wait.granted != nil {
			d.giveBackGranted() // its worker cannot be used any more
			continue
		}
		if !found && len(d.scratch.Full) == 0 {
			if d.anotherRound() {
				d.use.Yield()
				if !d.withoutScratch(ctx, d.pause) {
					d.wait.left = ctx.Err()
					return d.leave()
				}
				d.tried = d.tried[:0] // another round, within the operator's limits
				t = time.Now()
				found = d.candidates(d.offered, t)
			}
			if !found && len(d.scratch.Full) == 0 {
				return d.noWorker()
			}
		}
		if found {
			if d.findSession(ctx); d.awaitsFirst() {
				if !d.withoutScratch(ctx, d.awaitFirst) {
					return d.leave()
				}
				continue
			}
			if home := d.fullHome(); home != nil {
				d.use.Yield()
				if !d.awaitHome(ctx, home) {
					return d.leave()
				}
				continue
			}
			if up := d.book(t); up != nil {
				return up
			}
			if d.Pool.Queue.Length.Load() == 0 {
				continue // the worker has just filled up
			}
		}
		d.use.Yield() // so that no request waits for one that is queued
		if !d.withoutScratch(ctx, d.await) {
			return d.leave()
		}
	}
}

// noWorker returns the upstream of a request that has no worker left; nil if the proxy must
// ask again.
func (d *Dispatch) noWorker() *reverseproxy.Upstream {
	if d.anotherRound() {
		d.attempts++
		d.retryWanted = true
		return nil
	}
	return d.exhaust()
}

// exhaust ends the attempts, and returns the upstream with which the proxy calls RoundTrip
// once more. RoundTrip then gives the held answer or an error. For an error the upstream
// is noUpstream: Caddy counts errors against upstreams, and no worker made this one.
func (d *Dispatch) exhaust() *reverseproxy.Upstream {
	d.exhausted = true
	if d.held.resp != nil && d.wait.left == nil {
		return d.last
	}
	return noUpstream
}

// book chooses among the candidates and books the choice. It returns nil if the worker filled
// up meanwhile, or a queued request has first claim to its room.
func (d *Dispatch) book(t time.Time) *reverseproxy.Upstream {
	bound, last := d.boundPosition(), d.attempt
	request := d.score()
	i, lease := d.Pool.Scheduler.SelectAmong(t, request, d.scratch.Targets, bound, d.policy(), &d.scratch.Sel)
	a := &attempt{
		Attempt: pool.Attempt{Worker: d.scratch.Workers[i], Target: d.scratch.Targets[i].Target, Begun: t},
		lease:   lease, terms: d.scratch.Sel.Candidates[i], bound: bound >= 0,
	}
	d.attempt = a // at once: End ends the lease if anything below panics
	d.noticeChoice(t, bound, i)
	if !d.takeSlot(a) {
		d.endAttempt(false)
		d.attempt = last
		return nil
	}
	a.reason = d.reasonOf(bound, &a.terms)
	a.mark = a.Worker.Health.Admit()
	a.prompt = promptLength{d.scratch.Sel.Tokens, d.scratch.Sel.Known}
	a.Ahead, a.Kind = a.terms.PrefillTokens+a.prompt.tokens, d.kind()
	a.Worker.Progress.Begin(&a.Attempt)
	d.attempts++
	d.last = d.scratch.Upstreams[i]
	d.use.Choose(a.Target)
	d.tried = append(d.tried, a.Worker)
	d.show(a)
	d.trace.selected(d, a, t)
	if d.Shadow != nil && bound < 0 && d.plan.Request != nil {
		d.Shadow.compare(d, i)
	}
	return d.last
}

// noticeChoice logs what degraded the choice. The session stays bound if its worker holds the
// prompt but the policy chose another worker.
func (d *Dispatch) noticeChoice(t time.Time, bound, chosen int) {
	sel := &d.scratch.Sel
	if sel.Fault {
		d.Pool.Incidents.Raise(t, "the policy returns invalid workers, and the router takes the least loaded one", d.Pool.Logger)
	}
	if sel.Unknown > 0 {
		d.Pool.Incidents.Raise(t, "the load of some workers is unknown, and the router assumes the median", d.Pool.Logger)
	}
	if bound < 0 && d.homed() && chosen != sel.Home && sel.HomeHolds() {
		d.away = true
	}
}

// candidates gathers the targets to choose from and returns whether there are any.
func (d *Dispatch) candidates(offered reverseproxy.UpstreamPool, t time.Time) bool {
	if sec := t.Unix(); d.Pool.LastRequest.Load() != sec {
		d.Pool.LastRequest.Store(sec)
	}
	used, found := d.gather(offered, t)
	switch {
	case d.pinned(): // whatever it is at
	case used.Draining:
		d.Pool.Incidents.Raise(t, "only draining workers are left, and the router uses them", d.Pool.Logger)
	case used.Marked && len(d.tried) == 0:
		d.Pool.Incidents.Raise(t, "all workers are marked down, and the router uses them anyway", d.Pool.Logger)
	}
	return found
}

func (d *Dispatch) workersOffered() []*pool.Worker {
	list := make([]*pool.Worker, 0, len(d.offered))
	for _, row := range d.table(d.offered).Rows {
		list = append(list, row.Worker)
	}
	return list
}

// otherLeft returns whether a worker is available that was not tried.
func (d *Dispatch) otherLeft() bool {
	want, rows := d.wants(), d.table(d.offered).Rows
	for i, up := range d.offered {
		if w := rows[i].Worker; pool.Available(up) && !slices.Contains(d.tried, w) && d.Pool.Fits(&want, d.model, w) {
			return true
		}
	}
	return false
}

// noUpstream stands for a worker where there is none: see exhaust.
var noUpstream = &reverseproxy.Upstream{Host: new(reverseproxy.Host), Dial: "localhost:0"}
