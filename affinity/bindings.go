package affinity

import (
	"cmp"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// Defaults of [Options].
const (
	DefaultMaxSessions = 1_000_000
	DefaultSweep       = 500 * time.Millisecond
)

// Options are the settings of [NewBindings]. The zero value is usable.
type Options struct {
	// MaxSessions bounds the number of bindings. A binding takes less than 300 bytes, and
	// the store a fixed part of about 1 MiB. Default: 1,000,000.
	MaxSessions int

	// Sweep is the interval between searches for expired bindings. It bounds the delay of
	// a report, not the life of a binding. Default: 500ms.
	Sweep time.Duration

	// Clock returns the time and must be safe for concurrent use. The store reads the wall
	// clock once, for the first version; after that, lifetimes need only a monotonic
	// clock. Default: time.Now.
	Clock func() time.Time

	// OnExpire gets the end of each EngineBacked binding that expired, was evicted, or was
	// replaced by a binding to another target. The store calls it exactly once for each
	// such end, one call at a time and in order. OnExpire may use the store, except for
	// Close and Reported. Close drops the ends that are not yet reported. There is no call
	// after Close has returned.
	//
	// The session may have a new binding by then. Call Peek first, and do not release a
	// session that is back on the same target. A slow OnExpire delays later calls. While
	// 16,384 ends wait for it, the store drops further ones. Default: no reports.
	OnExpire func(key Key, b Binding, why Reason)

	// Journal is told of the changes that requests make. Default: none.
	Journal Journal
}

// Journal is told what becomes of bindings, except that they expire or are evicted. Its methods
// return at once, and do not call the store.
type Journal interface {
	// Bound is told of each Bind that has bound a session.
	Bound(key Key, want Want, v Version)
	// Used is told of each Touch that has restarted a time to live.
	Used(key Key)
	// Unbound is told of each Unbind that has ended a binding of the version.
	Unbound(key Key, v Version)
}

// Bindings keeps the bindings of sessions in memory. Its methods are safe for concurrent use,
// also during and after Close: then there are no bindings.
//
// Every read sees the writes that returned before it. Writes are conditional on a version, so
// that nobody overwrites a binding that he has not seen. If the condition does not hold, the
// method returns the current binding, false and no error: the caller needs the winner.
//
// It uses ristretto only as a map, and has its own deadlines, eviction and bounds.
// Ristretto's admission prefers frequent to recent keys, drops writes under load, and may delete
// a key during its renewal.
type Bindings struct {
	clock   func() time.Time
	journal Journal // may be nil
	start   time.Time
	stop    chan struct{}
	stopped chan struct{}
	waiting atomic.Int64 // requests: see Waiting

	closeOnce sync.Once

	onExpire  func(key Key, b Binding, why Reason) // may be nil
	wake      chan struct{}                        // has a value when an end waits
	reporting sync.Mutex                           // is held during a call of onExpire

	mu      sync.Mutex // guards all below, and the entries
	closed  bool
	cache   *ristretto.Cache[uint64, *entry]
	roster  roster
	version Version              // the last one
	ends    [Replaced + 1]uint64 // by reason, but for Replaced; 0: unbound, or not accepted
	pending []ended              // what onExpire has not got yet
	active  map[Key]*active      // the sessions with live requests
}

// NewBindings returns an empty store. The owner must Close it. The error says that
// ristretto refused its settings.
func NewBindings(o Options) (*Bindings, error) {
	if o.Clock == nil {
		o.Clock = time.Now
	}
	start := o.Clock()
	if o.Sweep <= 0 {
		o.Sweep = DefaultSweep
	}

	r := &Bindings{
		clock:   o.Clock,
		journal: o.Journal,
		start:   start,
		stop:    make(chan struct{}),
		stopped: make(chan struct{}),
		active:  make(map[Key]*active),

		onExpire: o.OnExpire,
		wake:     make(chan struct{}, 1),
		// The versions of an earlier run began at its start and grew by one a Bind. They stay
		// below the present time, for no store binds 10^9 times a second.
		version: Version(max(start.UnixNano(), 1)), //nolint:gosec // positive
		roster:  roster{counts: make(map[uint32]int)},
	}
	r.roster.limit(cmp.Or(max(o.MaxSessions, 0), DefaultMaxSessions))

	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *entry]{
		NumCounters:        1 << 14,
		MaxCost:            math.MaxInt64, // the roster evicts, by the last use
		BufferItems:        64,
		IgnoreInternalCost: true,
		// The identity without a second hash: entries have their key.
		KeyToHash: func(h uint64) (uint64, uint64) { return h, 0 },
		// No entry uses ristretto's own expiry.
		TtlTickerDurationInSec: 3600,
	})
	if err != nil {
		return nil, fmt.Errorf("affinity: creating cache: %w", err)
	}
	r.cache = cache
	go r.run(o.Sweep)
	return r, nil
}

// now returns the nanoseconds since the store was made.
func (r *Bindings) now() int64 { return int64(r.clock().Sub(r.start)) }

// Peek returns the session's binding without extending its life.
func (r *Bindings) Peek(key Key) (Binding, bool) {
	return r.with(&key, func(*entry, int64) bool { return true })
}

// Touch restarts the binding's time to live if it has the version expect.
func (r *Bindings) Touch(key Key, expect Version) (Binding, bool) {
	b, ok := r.with(&key, func(e *entry, now int64) bool { return e.version == expect && e.slide(now) })
	if ok && r.journal != nil {
		r.journal.Used(key)
	}
	return b, ok
}

// Unbind ends the session's binding if it has the version expect, and returns it. OnExpire does
// not get this end.
func (r *Bindings) Unbind(key Key, expect Version) (Binding, bool) {
	b, ok := r.with(&key, func(e *entry, _ int64) bool { return e.version == expect && r.finish(e, 0) })
	if ok && r.journal != nil {
		r.journal.Unbound(key, expect)
	}
	return b, ok
}

// with does something to the session's live entry. It returns the binding, and what do has returned.
func (r *Bindings) with(key *Key, do func(e *entry, now int64) bool) (b Binding, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if e := r.find(key, now); e != nil {
		ok = do(e, now)
		b = r.binding(e)
	}
	return b, ok
}

// Len returns the number of bindings. An expired one counts until its end is noticed.
func (r *Bindings) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.roster.slots)
}

// Ended returns how many bindings have Expired or were Evicted.
func (r *Bindings) Ended(why Reason) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ends[why]
}

// Bytes estimates the memory of the bindings that Len counts.
func (r *Bindings) Bytes() int64 { return int64(r.Len()) * entryBytes }

// SetMaxSessions changes the bound of a store in use; zero or less stands for the default. It
// evicts the bindings that no longer fit before it returns, each time the longest idle of
// a random sample. After Close it does nothing.
func (r *Bindings) SetMaxSessions(maxSessions int) {
	for more := true; more; {
		more = r.shrink(cmp.Or(max(maxSessions, 0), DefaultMaxSessions))
	}
}

// shrink sets the bound, and evicts a part of the bindings above it. It returns whether there are more.
func (r *Bindings) shrink(maxSessions int) (more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, failed := r.now(), 0
	for n := 0; n < chunkSize && len(r.roster.slots) > maxSessions; n++ {
		force := failed >= maxEvictions // live requests use nearly all, and the operator wants fewer
		if !r.evict(r.roster.pick(now, 0, false), now, force) {
			failed++
		}
	}
	r.roster.limit(maxSessions)
	return len(r.roster.slots) > maxSessions
}

// Close ends the store and all bindings, without reporting them. It waits for the current OnExpire
// call, so OnExpire must not call it.
func (r *Bindings) Close() error {
	r.closeOnce.Do(func() {
		r.mu.Lock()
		r.closed = true
		r.roster.slots, r.pending = nil, nil
		clear(r.roster.counts)
		r.mu.Unlock()
		close(r.stop)
		<-r.stopped
		r.reporting.Lock() // a call that Reported has made
		defer r.reporting.Unlock()
		r.cache.Close()
	})
	return nil
}

// maxEvictions is the number of attempts to make room before a write gives up.
const maxEvictions = 256

type write struct {
	Want
	now      int64
	idle     int64   // time since the last use, of a restored binding
	restores bool    // see Restore
	version  Version // of another router's binding, which reports the end of what it replaces; 0: a new one
}

// Bind binds the session if its present binding has the version expect, or for 0, if it has no
// binding. It returns the new binding and true. If there is no room, it evicts another session's
// binding.
//
// Bind to the same target renews the binding and reports no end, even if the kind changes. A
// caller that makes an EngineBacked binding RouterOnly must release the engine's session itself.
func (r *Bindings) Bind(key Key, expect Version, want Want) (b Binding, bound bool, err error) {
	want.TTL = min(want.TTL, maxTTL)
	b, bound, err = r.bind(&key, expect, want)
	if bound && r.journal != nil {
		r.journal.Bound(key, want, b.Version)
	}
	return b, bound, err
}

func (r *Bindings) bind(key *Key, expect Version, want Want) (b Binding, bound bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := write{Want: want, now: r.now()}
	switch e := r.find(key, w.now); {
	case e != nil && e.version != expect:
		return r.binding(e), false, nil
	case e != nil:
		return r.rebind(e, &w), true, nil
	case expect != 0:
		return Binding{}, false, nil
	}
	if b, bound = r.insert(key, &w); !bound {
		err = ErrFull
	}
	return b, bound, err
}

func (r *Bindings) rebind(e *entry, w *write) Binding {
	if e.Target != w.Target && w.version == 0 {
		r.report(e, Replaced)
	}
	e.set(w, r.versionOf(w))
	r.roster.slots[e.slot].check = e.due()
	return r.binding(e)
}

// versionOf returns the version that a write gives the binding. A new one was never used.
func (r *Bindings) versionOf(w *write) Version {
	if w.version != 0 {
		return w.version
	}
	r.version++
	return r.version
}

// insert stores a new entry for a session that has no live one. It returns false if there is no room, or the
// store is closed.
func (r *Bindings) insert(key *Key, w *write) (Binding, bool) {
	e := &entry{key: *key, Want: Want{Scope: w.Scope}}
	e.set(w, r.versionOf(w))
	if r.closed || !r.admit(e, w) {
		return Binding{}, false
	}
	// Ristretto queues a new key, and drops it if the queue is full. It finds the key after Wait.
	for !r.cache.Set(key.hash(), e, 1) {
		r.cache.Wait()
	}
	r.cache.Wait()
	if a := r.active[*key]; a != nil {
		a.settle()
	}
	return r.binding(e), true
}

// admit adds the entry to the roster, evicting others as needed. A restored entry does not evict one
// that was used later.
func (r *Bindings) admit(e *entry, w *write) bool {
	evicted := 0
	for failed := 0; failed < maxEvictions; {
		added, victim := r.roster.add(e, w.now, evicted)
		switch {
		case added:
			return true
		case victim == nil: // the sample had none of the scope
			failed++
		case w.restores && victim.used >= e.used:
			return false
		case r.evict(victim, w.now, false):
			evicted++
		default: // often only if live requests use nearly all bindings
			failed++
		}
	}
	return false
}
