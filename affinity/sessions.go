package affinity

import (
	"context"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Patience is how long a request waits for a concurrent first request of its session. An
// engine that streams answers sooner. One that does not stream answers when all is computed;
// then the request follows the other to the chosen target without waiting for its answer.
const Patience = 100 * time.Millisecond

// active is a session with live requests. The store's lock guards it.
type active struct {
	uses    int
	first   *Use           // the request that chooses the target of an unbound session, nil if none
	target  kvscore.Target // that it has chosen; zero if none
	changed chan struct{}  // closed at the next change of the above; nil if nobody waits

	alone chan struct{} // full while a request has the session alone; nil until one wants it
}

// Waiting returns the number of requests that wait for a concurrent first request.
func (r *Bindings) Waiting() int64 { return r.waiting.Load() }

// Use is one request's part in a session: of concurrent first requests, one chooses the target. The zero
// Use is none: its methods do nothing. A Use must not be copied after Begin. One goroutine at a time may
// use it.
type Use struct {
	store  *Bindings
	active *active
	key    Key
	alone  bool // it has the session alone
}

// Begin makes u a live request of the session. While it is live, the binding that it finds
// or makes does not expire, and makes no room for others. u must End.
func (r *Bindings) Begin(u *Use, key Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.active[key]
	if a == nil {
		r.find(&key, r.now()) // ends a binding that is overdue, which would live on
		a = new(active)
		r.active[key] = a
	}
	a.uses++
	*u = Use{store: r, active: a, key: key}
}

func (u *Use) lock() *sync.Mutex {
	u.store.mu.Lock()
	return &u.store.mu
}

// Begun returns whether u is a live request of the session.
func (u *Use) Begun(key Key) bool { return u.active != nil && u.key == key }

// Live returns the number of live requests of the session.
func (u *Use) Live() int {
	if u.active == nil {
		return 0
	}
	defer u.lock().Unlock()
	return u.active.uses
}

// Find returns what the session is bound to, and restarts the time to live. The zero Binding
// stands for none. Only one request at a time finds an unbound session without pending: it may
// choose any target, and must Bind, Yield or End. For others, pending is set until the first
// one has bound the session. They get a binding without a version, whose target is the chosen
// one, or the zero Binding.
//
// Find waits while pending, at most for the patience. A request that already holds a slot of a
// worker must not wait: it has no patience, and can make the binding itself. The error is
// that of the context.
func (u *Use) Find(ctx context.Context, patience time.Duration) (b Binding, pending bool, err error) {
	if u.active == nil {
		return Binding{}, false, nil
	}
	var late <-chan time.Time
	for {
		b, changed := u.look()
		if changed == nil || patience <= 0 {
			return b, changed != nil, nil
		}
		if late == nil {
			late = time.After(patience)
		}
		u.store.waiting.Add(1)
		select {
		case <-changed:
		case <-late:
			patience = 0
		case <-ctx.Done():
			err = ctx.Err()
		}
		u.store.waiting.Add(-1)
		if err != nil {
			return Binding{}, false, err
		}
	}
}

// look returns what the session is bound to, or is about to be. changed is nil if it is bound, or the
// request is the first.
func (u *Use) look() (b Binding, changed <-chan struct{}) {
	defer u.lock().Unlock()
	r, a := u.store, u.active
	now := r.now()
	if e := r.find(&u.key, now); e != nil {
		e.slide(now)
		return r.binding(e), nil
	}
	if a.first == nil || a.first == u {
		a.first = u
		return Binding{}, nil
	}
	if a.changed == nil {
		a.changed = make(chan struct{})
	}
	return Binding{Want: Want{Target: a.target}}, a.changed
}

// Choose says to which target the request goes, if it is the first of an unbound session.
// Requests that lose patience follow it.
func (u *Use) Choose(t kvscore.Target) {
	if u.active == nil {
		return
	}
	defer u.lock().Unlock()
	if a := u.active; a.first == u {
		a.target = t
	}
}

// Yield lets another request be the first, if this one is: its attempt has failed, or it is
// going to wait.
func (u *Use) Yield() {
	if u.active == nil {
		return
	}
	defer u.lock().Unlock()
	if u.active.first == u {
		u.active.settle()
	}
}

// settle ends the choice of the first request, and wakes those that wait. The caller holds the
// lock.
func (a *active) settle() {
	a.first, a.target = nil, kvscore.Target{}
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// Alone waits until no other request has the session alone, at most for the patience. Then u
// has it alone, until it ends. It returns false if the time is up. Requests that do not call
// Alone are not kept out. The order is that of the calls.
func (u *Use) Alone(ctx context.Context, patience time.Duration) (bool, error) {
	if u.active == nil || u.alone {
		return true, nil
	}
	mu := u.lock()
	if u.active.alone == nil {
		u.active.alone = make(chan struct{}, 1)
	}
	alone := u.active.alone
	mu.Unlock()
	select {
	case alone <- struct{}{}:
	default: // select would choose at random if the patience were over at once
		select {
		case alone <- struct{}{}:
		case <-time.After(patience):
			return false, nil
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	u.alone = true
	return true, nil
}

// HasAlone returns whether a request has the session alone.
func (r *Bindings) HasAlone(key Key) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.active[key]
	return a != nil && len(a.alone) > 0
}

// Bind binds the session as [Bindings.Bind] does, and ends the choice of the first request. Any
// request of the session may bind it.
func (u *Use) Bind(expect Version, want Want) (Binding, bool, error) {
	if u.active == nil {
		return Binding{}, false, nil
	}
	b, ok, err := u.store.Bind(u.key, expect, want)
	u.Yield()
	return b, ok, err
}

// End ends the request's part in the session. If the binding is the one of the version v, End
// first restarts its time to live. Version 0 leaves it as it is.
func (u *Use) End(v Version) {
	if u.active == nil {
		return
	}
	if v != 0 {
		u.store.Touch(u.key, v)
	}
	u.Yield()
	defer u.lock().Unlock()
	if u.alone {
		<-u.active.alone
	}
	if u.active.uses--; u.active.uses == 0 {
		delete(u.store.active, u.key)
	}
	*u = Use{}
}
