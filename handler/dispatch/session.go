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
	d.away, d.state, d.bound, d.near = false, affinity.Free, affinity.Binding{}, kvscore.Target{}
	key := d.plan.Session.Key
	if key.IsZero() {
		return
	}
	d.find(ctx, key)
	d.first = d.bound.Version
	if d.state == affinity.Bound && d.servesOthers(d.bound.Target) {
		// The session uses several models; this one is bound by itself.
		d.find(ctx, d.Pool.Secret.Model(key, d.plan.Model))
	}
	if !d.homed() {
		d.near = d.nearParent(ctx)
	}
}

func (d *Dispatch) find(ctx context.Context, key affinity.Key) {
	d.session = key
	if !d.binds() {
		d.bound, d.state = d.peek(ctx, key)
		return
	}
	if !d.use.Begun(key) {
		_ = d.use.End(ctx, 0)
		d.Pool.Sessions.Begin(&d.use, key)
	}
	var err error
	d.bound, d.state, err = d.use.Find(ctx, 0)
	if err != nil { // it is routed as if it had no session
		d.FallBack(fallbackUnbound)
		_ = d.use.End(ctx, 0)
	}
}

// peek returns what a session is bound to, without extending its life.
func (d *Dispatch) peek(ctx context.Context, key affinity.Key) (affinity.Binding, affinity.State) {
	b, ok, err := d.Pool.Sessions.Peek(ctx, key)
	switch {
	case err != nil:
		d.FallBack(fallbackUnbound)
	case ok:
		return b, affinity.Bound
	}
	return affinity.Binding{}, affinity.Free
}

// nearParent returns the target that the parent session is bound to, the zero Target if
// there is none. Leaving that target then has a price for the first turn of a sub-agent. So
// the sub-agent starts where its parent's prefix is cached, unless waiting there costs more.
func (d *Dispatch) nearParent(ctx context.Context) kvscore.Target {
	parent := d.plan.Session.Parent
	if parent.IsZero() || !d.mayLeave() {
		return kvscore.Target{}
	}
	b, state := d.peek(ctx, parent)
	if state == affinity.Bound && d.servesOthers(b.Target) {
		b, _ = d.peek(ctx, d.Pool.Secret.Model(parent, d.plan.Model))
	}
	return b.Target
}

// binds returns whether the request binds its session.
func (d *Dispatch) binds() bool {
	return !d.dry && d.plan.Request != nil && !d.plan.Session.Final
}

// homed returns whether the session has a target: it is bound, or a concurrent first request
// has chosen one.
func (d *Dispatch) homed() bool {
	return d.state == affinity.Bound || d.state == affinity.Following
}

// awaitsFirst returns whether the request waits for a concurrent first request of its session,
// which it does once an attempt. It does not if it is pinned, or already holds a place on a worker.
func (d *Dispatch) awaitsFirst() bool {
	return !d.waited && d.use.Begun(d.session) && d.state != affinity.Bound && d.state != affinity.Opening &&
		!d.pinned() && d.wait.granted == nil
}

// awaitFirst waits for a concurrent first request of the session. It returns false if the
// client left meanwhile.
func (d *Dispatch) awaitFirst(ctx context.Context) bool {
	d.waited = true
	_, d.state, _ = d.use.Find(ctx, affinity.Patience) // findSession reads all, and any error
	d.wait.left = ctx.Err()
	return d.wait.left == nil
}

// mayLeave returns whether the policy may leave the session's worker. It may not if the
// prompt is unknown: then only the session shows what is cached.
func (d *Dispatch) mayLeave() bool {
	r := d.plan.Request
	return d.Soft && !d.plan.Session.Held && r != nil && r.Kind != api.None
}

// servesOthers returns whether a target is an upstream that serves other models than the
// request's.
func (d *Dispatch) servesOthers(t kvscore.Target) bool {
	if d.model == "" {
		return false
	}
	w := d.named(d.offered, t.Worker)
	return w != nil && !w.KnownToServe(d.model)
}

// sessionTTL returns how long the session is remembered after its last use.
func (d *Dispatch) sessionTTL() time.Duration {
	if idle := d.plan.Session.TTL; idle > 0 {
		return idle
	}
	if d.bound.Version != 0 {
		return d.bound.TTL // that of an earlier turn
	}
	return d.Pool.Settings.Load().TTL
}

// commit binds the session to the target that answers it.
func (d *Dispatch) commit(ctx context.Context) {
	if !d.use.Begun(d.session) || d.away {
		return // a session that is bound elsewhere stays there for its next turn
	}
	target, idle := d.attempt.lease.Target(), d.plan.Session.TTL
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
	d.bound = b
}

// endTurn ends the request's part in the session. A computed turn restarts the binding's time to
// live: Use.End calls Touch. The client's final turn, computed or not, removes the bindings that
// the choice has seen, but no newer ones.
func (d *Dispatch) endTurn(computed bool) {
	switch {
	case d.plan.Session.Key.IsZero():
	case d.plan.Session.Final:
		d.unbind(d.session, d.bound.Version)
		d.unbind(d.plan.Session.Key, d.first)
	case computed:
		_ = d.use.End(context.Background(), d.bound.Version) // also if the client has left
	}
}

// unbind ends a binding, if it still has the version.
func (d *Dispatch) unbind(key affinity.Key, v affinity.Version) {
	if v != 0 {
		_, _, _ = d.Pool.Sessions.Unbind(context.Background(), key, v)
	}
}

// boundPosition returns the position of the target that the pin or the session decides on; -1
// if the policy chooses.
func (d *Dispatch) boundPosition() int {
	target := d.bound.Target
	if d.pinned() {
		if len(d.scratch.Targets) != 1 {
			return -1 // the policy chooses among the ranks
		}
		// a session that is bound to another target stays bound there
		d.away = d.homed() && target != d.scratch.Targets[0].Target
		return 0
	}
	if !d.homed() {
		return -1
	}
	// a worker that is left out because it is full keeps the session
	d.away = slices.ContainsFunc(d.scratch.Full, func(w *pool.Worker) bool { return w.ID == target.Worker })
	if d.mayLeave() {
		return -1
	}
	return slices.IndexFunc(d.scratch.Targets, func(t kvscore.TargetRef) bool { return t.Target == target })
}
