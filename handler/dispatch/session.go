package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// boundTo looks up and returns the target that the session is bound to, the zero
// Target if there is none.
func (rt *Dispatch) boundTo() (none kvscore.Target) {
	rt.session, rt.wait.away, rt.bound, rt.home = rt.plan.Session.Key, false, 0, 0
	if rt.session == "" {
		return none
	}
	b, ok := rt.Pool.Sessions.Peek(rt.session)
	rt.home = b.Version
	if ok && rt.servesOthers(b.Target) {
		// The session uses several models; this one is bound by itself.
		rt.session = plan.ModelKey(rt.session, rt.plan.Model)
		b, ok = rt.Pool.Sessions.Peek(rt.session)
	}
	if !ok {
		return none
	}
	rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL
	return b.Target
}

// homeTarget returns the target that the session is bound to, the zero Target if there
// is none. boundTo has looked it up.
func (rt *Dispatch) homeTarget() (none kvscore.Target) {
	if rt.bound == 0 {
		return none
	}
	return rt.seenAt
}

// mayLeave returns whether the policy may send the request to another worker than the
// session's. It may not if the prompt is unknown: then only the key says what is cached.
func (rt *Dispatch) mayLeave() bool {
	r := rt.plan.Request
	return rt.Soft && !rt.plan.Session.Held && r != nil && r.Kind != api.None
}

// servesOthers returns whether a target is an upstream that serves other models than the
// request's.
func (rt *Dispatch) servesOthers(t kvscore.Target) bool {
	if rt.model == "" {
		return false
	}
	for _, row := range rt.table(rt.offered).Rows {
		if w := row.Worker; w.ID == t.Worker {
			return !w.KnownToServe(rt.model)
		}
	}
	return false
}

// sessionTTL returns how long the session is remembered after its last use.
func (rt *Dispatch) sessionTTL() time.Duration {
	if idle := rt.plan.Session.TTL; idle > 0 {
		return idle
	}
	if rt.bound != 0 {
		return rt.keptFor // as an earlier turn said, wherever it goes now
	}
	return rt.Pool.Settings.Load().TTL
}

// commit binds the session to the target that answers it, or refreshes its binding. A
// last turn changes no binding: endTurn removes it.
func (rt *Dispatch) commit() {
	if rt.session == "" || rt.plan.Request == nil || rt.plan.Session.Final {
		return
	}
	if rt.wait.away {
		rt.Pool.Sessions.Get(rt.session) // it stays bound for its next turn
		return
	}
	target, idle := rt.attempt.lease.Target(), rt.plan.Session.TTL
	if rt.bound != 0 && rt.seenAt == target {
		b, ok := rt.Pool.Sessions.Get(rt.session)
		if rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL; ok && (idle == 0 || idle == b.TTL) {
			return
		}
		// The binding has just expired, or its time to live changes.
	}
	b, _, err := rt.Pool.Sessions.CompareAndSwap(rt.session, rt.bound, target, rt.sessionTTL(), affinity.RouterOnly)
	if err != nil {
		rt.FallBack(fallbackUnbound) // the store is full of others' sessions
		return
	}
	rt.bound, rt.seenAt, rt.keptFor = b.Version, b.Target, b.TTL
}

// endTurn ends the session's turn. The binding's time to live starts anew, or the
// client's last turn removes the bindings that the router saw when it chose. A newer
// binding stays. A request that reached no worker removes nothing: its client will
// repeat it.
func (rt *Dispatch) endTurn(computed bool) {
	switch {
	case rt.session == "":
	case rt.plan.Session.Final:
		rt.Pool.Sessions.Remove(rt.session, rt.bound)
		rt.Pool.Sessions.Remove(rt.plan.Session.Key, rt.home)
	case computed:
		rt.Pool.Sessions.Get(rt.session)
	}
}
