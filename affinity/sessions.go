package affinity

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Patience is how long a request waits for a concurrent first request of its session. An
// engine that streams answers sooner. One that does not stream answers when all is computed;
// then the request follows the other to the chosen target without waiting for its answer.
const Patience = 100 * time.Millisecond

// keepInterval is the time between two passes over the bindings that live requests use.
const keepInterval = time.Second

// Sessions coordinates the requests of one router over a [Store]. It holds no bindings. It
// counts the live requests of each session, and knows which of them initialises the binding.
//
// A session is bound, initialising or neither. It is initialising while a request that found
// no binding has neither bound the session nor failed. It is local to the router: in a store
// that routers share, the first Bind of several routers wins.
type Sessions struct {
	Store
	shards  [64]shard
	waiting atomic.Int64
	stop    chan struct{}
	once    sync.Once
	done    chan struct{} // closed when no goroutine is left
}

type shard struct {
	mu     sync.Mutex
	active map[Key]*active
	_      [48]byte
}

// active is a session with live requests. Its shard's lock guards it.
type active struct {
	uses    int
	version Version // of the binding that they use, 0 if none is known
	ttl     time.Duration
	touched time.Time // when the keeper or a request last restarted the time to live

	opener  *Use           // the request that initialises the binding, nil if none
	chosen  bool           // the opener has chosen target
	target  kvscore.Target // if chosen
	changed chan struct{}  // closed at the next change of the above; nil if nobody waits

	alone chan struct{} // full while a request has the session alone; nil until one wants it
}

// sparer is a store in memory that can ask which bindings are in use.
type sparer interface {
	Spare(live func(Key, Version) bool)
}

// NewSessions returns the sessions of a store, and takes over the store: Close closes it. A
// store that cannot ask which bindings are in use gets a Touch of each such one. The interval
// is a quarter of the binding's time to live, and at least a second.
func NewSessions(store Store) *Sessions {
	s := &Sessions{Store: store, stop: make(chan struct{}), done: make(chan struct{})}
	for i := range s.shards {
		s.shards[i].active = make(map[Key]*active)
	}
	if sp, ok := store.(sparer); ok {
		sp.Spare(s.live)
		close(s.done)
	} else {
		go s.keepLoop()
	}
	return s
}

// Close ends the goroutines of the sessions, and closes the store.
func (s *Sessions) Close() error {
	s.once.Do(func() { close(s.stop) })
	<-s.done
	return s.Store.Close()
}

func (s *Sessions) shard(key *Key) *shard { return &s.shards[key[len(key)-1]%64] }

// live returns whether requests use the binding of a version.
func (s *Sessions) live(key Key, v Version) bool {
	sh := s.shard(&key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	a := sh.active[key]
	return a != nil && a.version == v
}

// Live returns the number of sessions with live requests.
func (s *Sessions) Live() (n int) {
	for i := range s.shards {
		sh := &s.shards[i]
		sh.mu.Lock()
		n += len(sh.active)
		sh.mu.Unlock()
	}
	return n
}

// Waiting returns the number of requests that wait for a concurrent first request.
func (s *Sessions) Waiting() int64 { return s.waiting.Load() }

// Use is one request's part in a session. The zero Use is none: its methods do nothing. A
// Use must not be copied after Begin. One goroutine at a time may use it.
type Use struct {
	sessions *Sessions
	active   *active
	key      Key
	alone    bool // it has the session alone
}

// State says what a request knows of its session.
type State uint8

const (
	// Free: the session has no binding. The request may choose any target.
	Free State = iota
	// Opening is Free for the request that initialises the binding. Others wait for it, so
	// it must Bind, Yield or End.
	Opening
	// Following: another request initialises the binding, and has chosen a target.
	Following
	// Bound: the session has a binding.
	Bound
)

// Begin makes u a live request of the session. While it is live, the binding that it finds
// or makes does not expire, and makes no room for others. u must End.
func (s *Sessions) Begin(u *Use, key Key) {
	sh := s.shard(&key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	a := sh.active[key]
	if a == nil {
		a = new(active)
		sh.active[key] = a
	}
	a.uses++
	*u = Use{sessions: s, active: a, key: key}
}

// Begun returns whether u is a live request of the session.
func (u *Use) Begun(key Key) bool { return u.active != nil && u.key == key }

// Live returns the number of live requests of the session.
func (u *Use) Live() int {
	if u.active == nil {
		return 0
	}
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	return u.active.uses
}

// Find returns what the session is bound to, and restarts the time to live. If the session is
// Following, the binding has only a target.
//
// If another request initialises the binding, Find waits until that request has bound the
// session or yielded, at most for the patience. A request that already
// holds a slot of a worker must not wait: it has no patience, and can make the binding itself.
// The errors are those of the store and of the context.
func (u *Use) Find(ctx context.Context, patience time.Duration) (Binding, State, error) {
	if u.active == nil {
		return Binding{}, Free, nil
	}
	var end time.Time
	var missed Version // a version that this router knows and the store does not
	for {
		b, ok, err := u.sessions.Get(ctx, u.key)
		if err != nil {
			return Binding{}, Free, err
		}
		if ok {
			u.note(&b)
			return b, Bound, nil
		}
		t, state, changed := u.look(&missed)
		switch {
		case state == Bound:
			continue // it was bound after Get
		case changed == nil:
			return t, state, nil
		}
		if patience <= 0 {
			return t, state, nil
		}
		if end.IsZero() {
			end = time.Now().Add(patience)
		}
		u.sessions.waiting.Add(1)
		err = waitFor(ctx, changed, time.Until(end))
		u.sessions.waiting.Add(-1)
		if err != nil {
			return Binding{}, Free, err
		}
		patience = time.Until(end)
	}
}

// look returns the state of a session that has no binding, as the store says. It returns
// Bound if the store must be asked again, and a channel if the request may wait for another.
func (u *Use) look(missed *Version) (Binding, State, <-chan struct{}) {
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	a := u.active
	if a.version > *missed {
		*missed = a.version
		return Binding{}, Bound, nil
	}
	a.version = 0
	if a.opener == nil || a.opener == u {
		a.opener = u
		return Binding{}, Opening, nil
	}
	if a.changed == nil {
		a.changed = make(chan struct{})
	}
	if a.chosen {
		return Binding{Want: Want{Target: a.target}}, Following, a.changed
	}
	return Binding{}, Free, a.changed
}

// waitFor waits for the change, at most for d. The error is that of the context.
func waitFor(ctx context.Context, changed <-chan struct{}, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// Choose says to which target the request goes, if it initialises the binding. Requests that
// lose patience follow it.
func (u *Use) Choose(t kvscore.Target) {
	if u.active == nil {
		return
	}
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if a := u.active; a.opener == u {
		a.chosen, a.target = true, t
	}
}

// Yield gives up the initialisation, if it is the request's: its attempt has failed, or it is
// going to wait. One of those that wait for it initialises the binding instead.
func (u *Use) Yield() {
	if u.active == nil {
		return
	}
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	u.yield()
}

// yield is Yield for a caller that holds the shard's lock.
func (u *Use) yield() {
	if u.active.opener == u {
		u.active.settle()
	}
}

// settle ends the initialisation and wakes those that wait. The caller holds the shard's lock.
func (a *active) settle() {
	a.opener, a.chosen = nil, false
	if a.changed != nil {
		close(a.changed)
		a.changed = nil
	}
}

// note records the binding that the session has.
func (u *Use) note(b *Binding) {
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	a := u.active
	if b.Version < a.version {
		return // another request has seen a later one
	}
	a.version, a.ttl, a.touched = b.Version, b.TTL, time.Now()
	a.settle()
}

// Alone waits until no other request has the session alone, at most for the patience. Then u
// has it alone, until it ends. It returns false if the time is up. Requests that do not call
// Alone are not kept out. The order is that of the calls.
func (u *Use) Alone(ctx context.Context, patience time.Duration) (bool, error) {
	if u.active == nil || u.alone {
		return true, nil
	}
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	if u.active.alone == nil {
		u.active.alone = make(chan struct{}, 1)
	}
	alone := u.active.alone
	sh.mu.Unlock()
	select {
	case alone <- struct{}{}:
		u.alone = true
		return true, nil
	default:
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case alone <- struct{}{}:
		u.alone = true
		return true, nil
	case <-timer.C:
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// HasAlone returns whether a request has the session alone.
func (s *Sessions) HasAlone(key Key) bool {
	sh := s.shard(&key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	a := sh.active[key]
	return a != nil && len(a.alone) > 0
}

// Bind binds the session as [Store.Bind] does, and ends the initialisation. Any request of
// the session may bind it, also one that did not begin the initialisation.
func (u *Use) Bind(ctx context.Context, expect Version, want Want) (Binding, bool, error) {
	if u.active == nil {
		return Binding{}, false, nil
	}
	b, ok, err := u.sessions.Store.Bind(ctx, u.key, expect, want)
	if err == nil && b.Version != 0 {
		u.note(&b)
	} else {
		u.Yield()
	}
	return b, ok, err
}

// End ends the request's part in the session. If the binding is the one of the version v, End
// first restarts its time to live. Version 0 leaves it as it is.
func (u *Use) End(ctx context.Context, v Version) error {
	if u.active == nil {
		return nil
	}
	var err error
	if v != 0 {
		_, _, err = u.sessions.Touch(ctx, u.key, v)
	}
	sh := u.sessions.shard(&u.key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	u.yield()
	if u.alone {
		<-u.active.alone
	}
	if u.active.uses--; u.active.uses == 0 {
		delete(sh.active, u.key)
	}
	*u = Use{}
	return err
}
