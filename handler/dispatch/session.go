package dispatch

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// boundTo looks up the target that the session is bound to; the zero Target if there is none.
func (d *Dispatch) boundTo() (none kvscore.Target) {
	d.session, d.away, d.bound, d.home, d.near = d.plan.Session.Key, false, 0, 0, none
	if d.session == "" {
		return none
	}
	first, b, ok := d.bindingOf(&d.session)
	d.home = first
	if !ok {
		d.near = d.nearParent()
		return none
	}
	d.bound, d.seenAt, d.keptFor = b.Version, b.Target, b.TTL
	return b.Target
}

// bindingOf looks up the binding of a session. first is the version of the binding under
// the session's own key. If that is bound to a worker of other models, the session uses
// several: key then becomes that of the request's model, which is bound by itself.
func (d *Dispatch) bindingOf(key *string) (first uint64, b affinity.Binding, ok bool) {
	b, ok = d.Pool.Sessions.Peek(*key)
	first = b.Version
	if ok && d.servesOthers(b.Target) {
		ofModel := d.Pool.Secret.Model(*key, d.plan.Model)
		*key = string(ofModel[:])
		b, ok = d.Pool.Sessions.Peek(*key)
	}
	return first, b, ok
}

// nearParent returns the target that the parent session is bound to, the zero Target if
// there is none. The first turn of a sub-agent then has the price of leaving it: the sub-agent
// starts where its parent's prefix is cached, unless waiting there costs more.
func (d *Dispatch) nearParent() (none kvscore.Target) {
	parent := d.plan.Session.Parent
	if parent == "" || !d.mayLeave() {
		return none
	}
	if _, b, ok := d.bindingOf(&parent); ok {
		return b.Target
	}
	return none
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
	if d.bound != 0 {
		return d.keptFor // that of an earlier turn
	}
	return d.Pool.Settings.Load().TTL
}

// commit binds the session to the target that answers it, or refreshes its binding.
func (d *Dispatch) commit() {
	if d.session == "" || d.plan.Request == nil || d.plan.Session.Final {
		return
	}
	if d.away {
		d.refreshBinding() // it stays bound for its next turn
		return
	}
	target, idle := d.attempt.lease.Target(), d.plan.Session.TTL
	if d.bound != 0 && d.seenAt == target {
		b, ok := d.Pool.Sessions.Get(d.session)
		if d.bound, d.seenAt, d.keptFor = b.Version, b.Target, b.TTL; ok && (idle == 0 || idle == b.TTL) {
			return
		}
		// The binding has just expired, or its time to live changes.
	}
	b, _, err := d.Pool.Sessions.CompareAndSwap(d.session, d.bound, target, d.sessionTTL(), affinity.RouterOnly)
	if err != nil {
		d.FallBack(fallbackUnbound) // the store is full of others' sessions
		return
	}
	d.bound, d.seenAt, d.keptFor = b.Version, b.Target, b.TTL
}

// endTurn refreshes the session's binding. The client's last turn removes the bindings seen
// at the choice, but no newer ones. If no worker computed the turn, the client will repeat
// it.
func (d *Dispatch) endTurn(computed bool) {
	switch {
	case d.session == "":
	case d.plan.Session.Final:
		d.Pool.Sessions.Remove(d.session, d.bound)
		d.Pool.Sessions.Remove(d.plan.Session.Key, d.home)
	case computed:
		d.refreshBinding()
	}
}

// boundPosition returns the position of the target that the pin or the session decides on; -1
// if the policy chooses.
func (d *Dispatch) boundPosition() int {
	target := d.boundTo()
	if d.pinned() {
		if len(d.scratch.Targets) != 1 {
			return -1 // the policy chooses among the ranks
		}
		// a session that is bound to another target stays bound there
		d.away = d.bound != 0 && target != d.scratch.Targets[0].Target
		return 0
	}
	if d.bound == 0 {
		return -1
	}
	// a worker that is left out because it is full keeps the session
	d.away = slices.ContainsFunc(d.scratch.Full, func(w *pool.Worker) bool { return w.ID == target.Worker })
	if d.mayLeave() {
		return -1
	}
	return slices.IndexFunc(d.scratch.Targets, func(t kvscore.TargetRef) bool { return t.Target == target })
}

// refreshBinding starts the time to live of the session's binding anew.
func (d *Dispatch) refreshBinding() { d.Pool.Sessions.Get(d.session) }
