package dispatch

import (
	"context"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// findSession looks up what the session is bound to. A request that may bind the session
// becomes a live request of it.
func (d *Dispatch) findSession(ctx context.Context) {
	d.away = false
	if d.backed.id != "" {
		return // enterSession has found it, and nothing else counts
	}
	d.bound, d.pending, d.near = affinity.Binding{}, false, kvscore.Target{}
	s := &d.plan.Session
	if s.Key.IsZero() {
		return
	}
	if d.binds() {
		d.bound, d.pending = d.find(ctx)
	} else {
		d.bound = d.peek(ctx, s.Key)
	}
	if s.BackedOnly && d.bound.Kind != affinity.EngineBacked {
		d.bound, d.pending = affinity.Binding{}, false
	}
	if !d.homed() {
		d.near = d.nearParent(ctx)
	}
}

// find returns what the session is bound to, as Use.Find does. The request becomes a live one of
// the session.
func (d *Dispatch) find(ctx context.Context) (b affinity.Binding, pending bool) {
	key := d.plan.Session.Key
	if !d.use.Begun(key) {
		d.Pool.Sessions.Begin(&d.use, key)
	}
	b, pending, err := d.use.Find(ctx, 0)
	if err != nil { // it is routed as if it had no session
		d.FallBack(fallbackUnbound)
		_ = d.use.End(ctx, 0)
	}
	return b, pending
}

// peek returns what a session is bound to, without extending its life.
func (d *Dispatch) peek(ctx context.Context, key affinity.Key) affinity.Binding {
	b, ok, err := d.Pool.Sessions.Peek(ctx, key)
	if err != nil && !d.dry {
		d.FallBack(fallbackUnbound)
	}
	if !ok {
		return affinity.Binding{}
	}
	return b
}

// nearParent returns the target that the parent session is bound to, the zero Target if
// there is none. Leaving that target then has a price for the first turn of a sub-agent. So
// the sub-agent starts where its parent's prefix is cached, unless waiting there costs more.
func (d *Dispatch) nearParent(ctx context.Context) kvscore.Target {
	parent := d.plan.Session.Parent
	if parent.IsZero() || !d.mayLeave() {
		return kvscore.Target{}
	}
	return d.peek(ctx, parent).Target
}

// binds returns whether the request binds its session.
func (d *Dispatch) binds() bool {
	return !d.dry && d.plan.Request != nil && !d.plan.Session.Final && !d.plan.Session.BackedOnly
}

// homed returns whether the session has a target: it is bound, or a concurrent first request
// has chosen one.
func (d *Dispatch) homed() bool {
	return d.bound.Target != kvscore.Target{}
}

// awaitsFirst returns whether the request waits for a concurrent first request of its session,
// which it does once an attempt. It does not if it is pinned.
func (d *Dispatch) awaitsFirst() bool {
	return d.pending && !d.waited && !d.pinned()
}

// awaitFirst waits for a concurrent first request of the session. It returns an error if the
// client left meanwhile.
func (d *Dispatch) awaitFirst(ctx context.Context) error {
	d.waited = true
	_, _, _ = d.use.Find(ctx, affinity.Patience) // findSession reads all, and any error
	return ctx.Err()
}

// crowd is the most requests of a session that run at once and count as one conversation.
const crowd = 8

// crowded returns whether many clients share the session's key. Then it must not bind them all to
// one worker.
func (d *Dispatch) crowded() bool {
	return !d.Hard && !d.plan.Session.Held && d.use.Live() > crowd
}

// excluded returns whether the client's constraints, which hold for this request only, exclude a
// target that is still an upstream.
func (d *Dispatch) excluded(t kvscore.Target) bool {
	if !d.plan.Constrained() {
		return false
	}
	w, want := d.offers.Worker(t.Worker), d.wants()
	return w != nil && d.Pool.Meets(&want, w) != pool.Fits
}

// fullHome returns the session's worker if that is full and the operator wants the turn to wait
// for it; nil otherwise.
func (d *Dispatch) fullHome(c *pool.Candidates) *pool.Worker {
	if !d.Hard || !d.homed() || d.pinned() {
		return nil
	}
	return fullOf(c, d.bound.Target)
}

// fullOf returns the worker of a target if that is left out only because it is full; nil
// otherwise.
func fullOf(c *pool.Candidates, t kvscore.Target) *pool.Worker {
	i := slices.IndexFunc(c.Full, func(w *pool.Worker) bool { return w.ID == t.Worker })
	if i < 0 {
		return nil
	}
	return c.Full[i]
}

// mayLeave returns whether the policy may leave the session's worker. It may not if the
// prompt is unknown: then only the session shows what is cached.
func (d *Dispatch) mayLeave() bool {
	r := d.plan.Request
	return d.Soft && !d.plan.Session.Held && r != nil && r.Kind != api.None
}

// sessionTTL returns how long the session is remembered after its last use.
func (d *Dispatch) sessionTTL() time.Duration {
	if idle := d.plan.Session.TTL; idle > 0 {
		return idle
	}
	if d.bound.Version != 0 {
		return d.bound.TTL // that of an earlier turn
	}
	return time.Duration(d.Pool.Settings.Load().TTL)
}

// commit binds the session to the target that answers it.
func (d *Dispatch) commit(ctx context.Context) {
	if !d.use.Begun(d.plan.Session.Key) || d.away || d.bound.Kind == affinity.EngineBacked {
		return // a session that is bound elsewhere stays there for its next turn, and one in an engine always
	}
	target, idle := d.attempt.Target, d.plan.Session.TTL
	if d.bound.Version != 0 && d.bound.Target == target && (idle == 0 || idle == d.bound.TTL) {
		return
	}
	b, _, err := d.use.Bind(ctx, d.bound.Version, affinity.Want{
		Target: target, TTL: d.sessionTTL(), Scope: d.plan.Session.Scope, Kind: affinity.RouterOnly,
	})
	if err != nil {
		d.FallBack(fallbackUnbound) // live requests of others use all bindings
		return
	}
	if d.bound.Version == 0 {
		d.Pool.BoundModels.Add(d.plan.Model)
	}
	d.bound = b
}

// endTurn ends the request's part in the session. A computed turn restarts the binding's time to
// live: Use.End calls Touch. The client's final turn, computed or not, removes the binding that
// the choice has seen, but no newer one.
func (d *Dispatch) endTurn(computed bool) {
	switch {
	case d.plan.Session.Key.IsZero():
	case d.plan.Session.Final:
		d.unbind(false)
	case computed:
		_ = d.use.End(context.Background(), d.bound.Version) // also if the client has left
	}
}

// unbind ends the binding that the choice has seen, if the session still has it. lost: a turn
// to come must be told if an engine held the session.
func (d *Dispatch) unbind(lost bool) {
	if v := d.bound.Version; v != 0 && !d.dry {
		_, _, _ = d.Pool.EndSession(context.Background(), d.plan.Session.Key, v, lost)
	}
}

// boundPosition returns the position of the target that the pin or the session decides on; -1
// if the policy chooses.
func (d *Dispatch) boundPosition(c *pool.Candidates) int {
	target := d.bound.Target
	if d.pinned() {
		if len(c.Targets) != 1 {
			return -1 // the policy chooses among the ranks
		}
		// a session that is bound to another target stays bound there
		d.away = d.homed() && target != c.Targets[0].Target
		return 0
	}
	if !d.homed() {
		return -1
	}
	// A worker that is left out because it is full, or for this request only, keeps the session.
	d.away = fullOf(c, target) != nil || d.excluded(target)
	if d.mayLeave() {
		return -1
	}
	if d.crowded() {
		d.away = true
		return -1
	}
	return slices.IndexFunc(c.Targets, func(t kvscore.TargetRef) bool { return t.Target == target })
}
