package sim

import (
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
)

// phase is the prefill phase of a request; without a lease, the request is whole.
type phase struct {
	engine.Job
	lease *kvscore.Lease
	at    int
}

// placePhases places a request where the first workers prefill and the others decode.
func (r *replay) placePhases(q *request, ask *kvscore.Request, bound int) {
	o := q.router
	prefill, decode := o.refs[:r.Prefill], o.refs[r.Prefill:]
	ahead := *ask
	ahead.Phase, ahead.ExpectedTokens, ahead.BoundTarget = kvscore.PhasePrefill, 1, kvscore.Target{}
	ask.Split = o.scheduler.Forecast(r.clock(), &ahead, prefill, o.policy, r.Phases, &o.selection)
	q.at, q.lease = o.scheduler.Select(r.clock(), ask, decode, max(-1, bound-r.Prefill), o.policy, &o.selection)
	q.at += r.Prefill
	q.elsewhere = ask.BoundTarget != (kvscore.Target{}) && q.lease.Target() != ask.BoundTarget && o.selection.BoundTargetHolds()
	if !q.lease.IsSplit() {
		r.send(q)
		return
	}
	r.split++
	p := &q.ahead
	p.at, p.lease = o.scheduler.Select(r.clock(), &ahead, prefill, -1, o.policy, &o.selection)
	p.Job = engine.Job{Number: q.Number, Chain: q.Chain, In: q.In, Out: 1, Answer: q.Answer, Kept: true}
	r.engines[p.at].Add(&p.Job)
	r.begin(p.at)
}

// prefilled begins the transfer of a prompt's KV.
func (r *replay) prefilled(q *request) {
	p, now := &q.ahead, r.clock()
	p.lease.FirstToken(now)
	p.lease.Counted(kvscore.Counts{Prompt: int64(p.In), Cached: int64(p.Cached), CachedReported: true})
	p.lease.End(true, nil)
	q.lease.PrefillAnswered(now)
	lacks := q.In - r.engines[q.at].Cache().Held(q.Chain)*r.Trace.BlockTokens
	r.events.push(event{at: r.now + r.transfer(lacks), moved: true, n: q.Number})
}

// moved ends the transfer.
func (r *replay) moved(q *request) {
	p := &q.ahead
	r.engines[p.at].Drop(&p.Job)
	r.begin(p.at) // its queue may have waited for memory
	q.Loaded = true
	r.send(q)
}
