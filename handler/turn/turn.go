// Package turn is one request's part in its session: which target the session is bound to,
// and what the request makes of that. It opens and closes the sessions that engines hold.
//
// The package chooses no target: dispatch asks for the one that the session is bound to, chooses,
// and says what became of it.
package turn

import (
	"context"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Sessions are the sessions of a pool as one configuration treats them.
type Sessions struct {
	Pool   *pool.Pool
	Client *upstream.Client // opens sessions in engines
	Hard   bool             // all turns wait for the bound target if that is full
	Soft   bool             // leaving the bound target has a price
	Failed func()           // is called if a session cannot be found or bound
}

// State is what an answer made of its session, as the response headers and the metric show it.
//
//	state    the session was bound   the answer came from   the session is bound now
//	New      to none                 any target             to that target
//	Bound    to a target             that target            to the same target
//	Away     to a target             another target         to the same target as before
//	Moved    to a target             another target         to the other target
//	Unbound  to none                 any target, or none    to none: an error, or the store is full
//	Final    to a target or none     any target             to none: it ends with this turn
//	None     the request has no session
//
// A session whose concurrent first request has chosen a target is bound to it.
type State string

const (
	None    State = ""
	New     State = "new"
	Bound   State = "bound"
	Away    State = "away"
	Moved   State = "moved"
	Unbound State = "unbound"
	Final   State = "final"
)

// States are all but None.
var States = []State{New, Bound, Away, Moved, Unbound, Final}

// Turn is one request's part in its session. One goroutine at a time may use it.
type Turn struct {
	*Sessions
	plan *plan.Plan
	dry  bool // it changes nothing

	use       affinity.Use     // none if the request must not bind the session
	bound     affinity.Binding // as last seen; zero if there is none. Without a version: see Use.Find
	parent    kvscore.Target   // of the session that started this unbound one
	pending   bool             // a concurrent first request has not bound the session yet
	waited    bool             // this attempt has waited for that
	elsewhere bool             // another target serves this attempt, and the session stays bound
	chose     bool             // there was an attempt

	held   string           // the engine's id of the session, empty if no engine holds it
	opened affinity.Version // of the binding made for this request, until an answer begins
	closes *affinity.Want   // to be closed after the request
	claim  string           // of an engine's session, if routers share it
	lock   *lock            // the same: no other router has a turn of the session
}

// Enter begins a request's part in its session. If an engine holds the session, the request
// waits until it has the session alone. A dry turn changes nothing and does not wait. The error
// is a refusal. Otherwise the turn must End. Enter fills in t, which the caller must not copy.
func (s *Sessions) Enter(ctx context.Context, t *Turn, p *plan.Plan, dry bool) error {
	t.Sessions, t.plan, t.dry = s, p, dry
	var err error
	switch s := &p.Session; {
	case s.EngineSession != "" && p.Request != nil:
		err = t.enterEngine(ctx)
	case s.Held && !dry && !s.Key.IsZero():
		err = t.haveAlone(ctx) // a second turn, or a close, can end SGLang's scheduler
	}
	if err != nil {
		t.leaveClaims(false, &t.bound.Want)
		t.use.End(0)
	}
	return err
}

// Find looks up the session's target for an attempt. A request that may bind the session becomes
// a live request of it.
func (t *Turn) Find(ctx context.Context) {
	t.elsewhere = false
	s := &t.plan.Session
	if t.held != "" || s.Key.IsZero() {
		return
	}
	t.bound, t.pending, t.parent = affinity.Binding{}, false, kvscore.Target{}
	if t.binds() {
		t.find(ctx)
	} else {
		t.bound = t.peek(s.Key)
	}
	switch {
	case s.BackedOnly && t.bound.Kind != affinity.EngineBacked:
		t.bound, t.pending = affinity.Binding{}, false
	case isLost(&t.bound):
		t.bound = affinity.Binding{Version: t.bound.Version} // the next Bind replaces it
	}
	if t.bound.Target == (kvscore.Target{}) && !s.Parent.IsZero() && t.priced() {
		t.parent = t.peek(s.Parent).Target
	}
}

// find sets what the session is bound to. The request becomes a live one of the session.
func (t *Turn) find(ctx context.Context) {
	key := t.plan.Session.Key
	if !t.use.Begun(key) {
		t.Pool.Sessions.Begin(&t.use, key)
	}
	var err error
	if t.bound, t.pending, err = t.use.Find(ctx, 0); err != nil { // it is routed as if it had no session
		t.Failed()
		t.use.End(0)
	}
}

// peek returns what a session is bound to, without extending its life.
func (t *Turn) peek(key affinity.Key) affinity.Binding {
	b, _ := t.Pool.Sessions.Peek(key)
	return b
}

func (t *Turn) binds() bool {
	return !t.dry && t.plan.Request != nil && !t.plan.Session.Final && !t.plan.Session.BackedOnly
}

// Pending returns whether a concurrent first request is about to choose the session's target, and
// this attempt has not waited for that.
func (t *Turn) Pending() bool { return t.pending && !t.waited }

// Await waits for a concurrent first request of the session. Find then tells what it has found.
// The error is the context's.
func (t *Turn) Await(ctx context.Context) error {
	t.waited = true
	t.use.Find(ctx, affinity.Patience) //nolint:errcheck // Find is called again
	return ctx.Err()
}

// NextAttempt says that the last attempt has not bound the session.
func (t *Turn) NextAttempt() {
	t.waited = false
	t.use.Yield()
}

// Yield lets a concurrent request of the session choose its target, for this one waits.
func (t *Turn) Yield() { t.use.Yield() }

// Choose says to which target the attempt goes.
func (t *Turn) Choose(at kvscore.Target) {
	t.chose = true
	t.use.Choose(at)
}

// BoundTarget returns the target that the session is bound to, the zero Target if there is none.
// priced: the policy may leave it, at a price. Otherwise it decides. If the prompt is unknown it
// decides, too: then only the session shows what is cached.
func (t *Turn) BoundTarget() (at kvscore.Target, priced bool) { return t.bound.Target, t.priced() }

func (t *Turn) priced() bool {
	r := t.plan.Request
	return t.Soft && !t.plan.Session.Held && t.bound.Kind != affinity.Fixed && r != nil && r.Kind != api.None
}

// Warm returns the target that has a price to leave: the session's, else that of its parent.
// So the first turn of a sub-agent starts where its parent's prefix is cached, unless waiting
// there costs more. It is the zero Target if there is none.
func (t *Turn) Warm() kvscore.Target {
	if t.bound.Target != (kvscore.Target{}) {
		return t.bound.Target
	}
	return t.parent
}

// crowd is the most requests of a session that run at once and count as one conversation.
const crowd = 8

// Crowded returns whether many clients share the session's key. Then it must not bind them all to
// one worker.
func (t *Turn) Crowded() bool {
	return !t.Hard && !t.plan.Session.Held && t.bound.Kind != affinity.Fixed && t.use.Live() > crowd
}

// WaitsIfFull returns whether the turn waits for the bound target if that is full. Either the operator
// wants it, or the client has opened the session there, and other engines refuse its turns.
func (t *Turn) WaitsIfFull() bool {
	return t.Hard || t.plan.Session.Held && t.bound.Kind == affinity.Fixed
}

// ServeElsewhereOnce says that another target serves this attempt, and that the binding stays.
func (t *Turn) ServeElsewhereOnce() { t.elsewhere = true }

// IsServedElsewhere returns whether ServeElsewhereOnce was called for this attempt.
func (t *Turn) IsServedElsewhere() bool { return t.elsewhere }

// Commit says that an answer of a target begins, and returns what that makes of the session. A
// good answer binds the session, except after ServeElsewhereOnce and if an engine holds the session.
func (t *Turn) Commit(at kvscore.Target, good bool) State {
	s, had := &t.plan.Session, t.bound.Target
	if good {
		t.opened = 0 // the session stays in the engine
		t.bind(at)
	}
	t.use.Yield() // others need not wait for a session that was not bound
	switch {
	case s.Key.IsZero() || t.plan.Request == nil:
		return None
	case s.Final:
		return Final
	case t.bound.Version == 0 || t.bound.Target == (kvscore.Target{}):
		return Unbound
	case t.bound.Target != at:
		return Away
	case had == at:
		return Bound
	case had != (kvscore.Target{}):
		return Moved
	}
	return New
}

func (t *Turn) bind(at kvscore.Target) {
	s := &t.plan.Session
	if !t.use.Begun(s.Key) || t.elsewhere || t.bound.Kind == affinity.EngineBacked || t.plan.Request == nil {
		return
	}
	if t.bound.Kind == affinity.Fixed && t.Pool.IsNowUpstream(t.bound.Target.Worker) {
		return
	}
	if t.bound.Version != 0 && t.bound.Target == at && (s.TTL == 0 || s.TTL == t.bound.TTL) {
		return
	}
	b, _, err := t.use.Bind(t.bound.Version, affinity.Want{Target: at, TTL: t.ttl(), Scope: s.Scope})
	if err != nil {
		t.Failed() // live requests of others use all bindings
		return
	}
	t.bound = b
}

// ttl returns how long the session is remembered after its last use: as the client says, else as
// an earlier turn said.
func (t *Turn) ttl() time.Duration {
	if idle := t.plan.Session.TTL; idle > 0 {
		return idle
	}
	if t.bound.TTL > 0 {
		return t.bound.TTL
	}
	return time.Duration(t.Pool.Settings.Load().TTL)
}

// Forget unbinds the session from a target that gives unreadable answers.
func (t *Turn) Forget(at kvscore.Target) {
	if t.bound.Target == at && t.bound.Kind == affinity.RouterOnly {
		t.unbind()
	}
}

// unbind ends the binding that the request has seen, but no newer one.
func (t *Turn) unbind() {
	if v := t.bound.Version; v != 0 && !t.dry {
		Unbind(t.Pool, t.plan.Session.Key, v)
	}
}

// End ends the request's part in the session. A computed turn restarts the binding's time to
// live, also if the client has left. The client's final turn unbinds the session, unless it was
// refused.
func (t *Turn) End(computed bool) {
	var used affinity.Version
	switch {
	case t.plan.Session.Key.IsZero():
	case t.plan.Session.Final && t.chose:
		t.unbind()
	case computed:
		used = t.bound.Version
	}
	held := t.bound.Want
	if t.closes != nil { // before the next turn of the session begins
		t.Pool.Closer.Close(t.closes)
		held, t.closes = *t.closes, nil
	}
	t.leaveClaims(computed, &held)
	t.use.End(used)
}

// ResponseAt returns the target that keeps the response, or anything else, which the request names;
// false if none is known to.
func (t *Turn) ResponseAt() (at kvscore.Target, ok bool) {
	at, _, ok = t.Pool.Responses.Find(t.plan.Response, !t.dry)
	return at, ok
}

// KeepResponse records the target that keeps a response, unless the client asks not to keep it.
func (t *Turn) KeepResponse(id string, at kvscore.Target) {
	if t.plan.Request.Unstored {
		return
	}
	session := t.plan.Session.Identity
	if session == (affinity.Identity{}) {
		session = t.Pool.Secret().Identity(id) // the response begins a conversation
	}
	t.Pool.Responses.Keep(id, at, session)
}
