package affinity

import (
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// Defaults of [Options] and [Ristretto.SetLimits].
const (
	DefaultMaxSessions = 1_000_000
	DefaultMaxBytes    = 256 << 20
	DefaultSweep       = 5 * time.Second
)

// Options are the settings of [NewRistretto]. The zero value is usable.
type Options struct {
	// MaxSessions bounds the number of bindings. Default: 1,000,000.
	MaxSessions int

	// MaxBytes bounds the memory of the bindings, in bytes, as Bytes estimates it. A
	// binding takes about 300 bytes and its session id. The bound excludes a fixed part of
	// about 1 MiB. Default: 256 MiB.
	MaxBytes int64

	// Sweep is the interval between searches for expired bindings. It bounds the delay of
	// a report, not the life of a binding. Default: 5s.
	Sweep time.Duration

	// Clock returns the time and must be safe for concurrent use. Default: time.Now; its
	// monotonic part makes lifetimes independent of clock changes.
	Clock func() time.Time

	// OnExpire gets the end of each EngineBacked binding that expired, was evicted, or was
	// replaced by a binding to another target. The store calls it exactly once for each
	// such end, one call at a time, in order for a session. The calling goroutine holds no
	// lock: OnExpire may use the store, except for Close. Close drops the ends that are
	// not yet reported. There is no call after Close has returned.
	//
	// The session may have a new binding by then. Call Peek first, and do not release a
	// session that is back on the same target. A slow OnExpire delays later calls. If
	// EngineBacked bindings and unreported ends reach twice the limits plus 1,024, the
	// store refuses further EngineBacked bindings with ErrFull. Default: no reports.
	OnExpire func(session string, b Binding, why Reason)
}

// Ristretto is a [Store] in memory. It uses ristretto only as a concurrent map, and has its
// own deadlines, eviction and bounds. Ristretto's admission prefers frequent to recent
// keys, drops writes under load, and may delete a key during its renewal.
type Ristretto struct {
	cache   *ristretto.Cache[uint64, *entry]
	hash    func(session string) uint64
	clock   func() time.Time // nil stands for time.Now
	start   time.Time
	version atomic.Uint64
	queue   *queue
	roster  roster

	// stripes order changes of the cache's entry for a hash. A caller holds one during
	// calls of the cache, which may wait for ristretto's goroutine. That goroutine takes
	// no stripe.
	stripes [256]paddedMutex

	// Every operation holds a gate for reading, so that Close cannot close the cache
	// meanwhile. There are many gates to avoid one contended word. Close holds all of
	// them to set closed.
	gates  [64]paddedRWMutex
	closed bool

	limitsMu  sync.Mutex // one SetLimits at a time
	closeOnce sync.Once
	stop      chan struct{}
	swept     chan struct{}
}

type paddedMutex struct {
	sync.Mutex
	_ [56]byte
}

type paddedRWMutex struct {
	sync.RWMutex
	_ [40]byte
}

// NewRistretto returns an empty store. The owner must Close it. The error says that
// ristretto refused its settings.
func NewRistretto(o Options) (*Ristretto, error) {
	start := time.Now()
	if o.Clock != nil {
		start = o.Clock()
	}
	if o.Sweep <= 0 {
		o.Sweep = DefaultSweep
	}
	o.MaxSessions, o.MaxBytes = limits(o.MaxSessions, o.MaxBytes)

	seed := maphash.MakeSeed()
	r := &Ristretto{
		// Seeded, so that a client cannot choose ids that collide.
		hash:  func(session string) uint64 { return maphash.String(seed, session) },
		clock: o.Clock,
		start: start,
		stop:  make(chan struct{}),
		swept: make(chan struct{}),
	}
	r.roster = roster{maxSessions: o.MaxSessions, maxBytes: o.MaxBytes, random: maphash.String(seed, "sample")}

	cache, err := ristretto.NewCache(&ristretto.Config[uint64, *entry]{
		// The counters only serve ristretto's eviction, which does not happen.
		NumCounters:        1 << 14,
		MaxCost:            headroom(o.MaxSessions),
		BufferItems:        64,
		IgnoreInternalCost: true,
		// The identity without a second hash: entries have their session.
		KeyToHash: func(h uint64) (uint64, uint64) { return h, 0 },
		OnEvict:   r.onEvict,
		// No entry uses ristretto's own expiry.
		TtlTickerDurationInSec: 3600,
	})
	if err != nil {
		return nil, fmt.Errorf("affinity: creating cache: %w", err)
	}
	r.cache = cache
	if o.OnExpire != nil {
		r.queue = newQueue(o.OnExpire)
		r.queue.setLimits(o.MaxSessions, o.MaxBytes)
	}
	go r.sweepLoop(o.Sweep)
	return r, nil
}

func limits(maxSessions int, maxBytes int64) (int, int64) {
	if maxSessions <= 0 {
		maxSessions = DefaultMaxSessions
	}
	if maxBytes <= 0 {
		maxBytes = DefaultMaxBytes
	}
	return maxSessions, maxBytes
}

// headroom returns ristretto's bound for our bound. Ristretto also counts entries whose
// deletion waits in its buffer of 32,768 places, and entries that have ended but are not
// detached yet.
func headroom(maxSessions int) int64 {
	return int64(maxSessions) + int64(maxSessions)/8 + 1<<17
}

// onEvict keeps the store correct if ristretto evicts an entry after all. It runs on
// ristretto's goroutine, so it must not wait for a goroutine that waits for ristretto.
// Ristretto passes no value for a deleted key.
func (r *Ristretto) onEvict(item *ristretto.Item[*entry]) {
	if e := item.Value; e != nil {
		r.evict(e, 0, r.now(), true)
	}
}

// now returns the nanoseconds since the store was made.
func (r *Ristretto) now() int64 {
	if r.clock == nil {
		return int64(time.Since(r.start)) // reads one clock; time.Now reads two
	}
	return int64(r.clock().Sub(r.start))
}

func (r *Ristretto) stripe(hash uint64) *paddedMutex {
	return &r.stripes[hash%uint64(len(r.stripes))]
}

// enter begins an operation. It returns the gate that the caller must RUnlock, or false if
// the store is closed.
func (r *Ristretto) enter(hash uint64) (*paddedRWMutex, bool) {
	g := &r.gates[hash%uint64(len(r.gates))]
	g.RLock()
	if r.closed {
		g.RUnlock()
		return nil, false
	}
	return g, true
}

// find returns the session's entry or nil. The entry may have ended.
func (r *Ristretto) find(hash uint64, session string) *entry {
	e, ok := r.cache.Get(hash)
	if !ok || e.session != session {
		return nil
	}
	return e
}

// Get implements [Store].
func (r *Ristretto) Get(session string) (Binding, bool) {
	return r.read(session, true)
}

// Peek implements [Store].
func (r *Ristretto) Peek(session string) (Binding, bool) {
	return r.read(session, false)
}

func (r *Ristretto) read(session string, slide bool) (Binding, bool) {
	h := r.hash(session)
	g, ok := r.enter(h)
	if !ok {
		return Binding{}, false
	}
	e := r.find(h, session)
	if e == nil {
		g.RUnlock()
		return Binding{}, false
	}
	now := r.now()
	e.mu.Lock()
	if !e.ended && e.due.Load() > now {
		if slide {
			e.slide(now)
		}
		b := r.binding(e)
		e.mu.Unlock()
		g.RUnlock()
		return b, true
	}
	e.mu.Unlock()
	if r.expire(e, now) {
		r.detach(e)
	}
	g.RUnlock()
	return Binding{}, false
}

// Remove implements [Store].
func (r *Ristretto) Remove(session string, version uint64) (Binding, bool) {
	h := r.hash(session)
	g, ok := r.enter(h)
	if !ok {
		return Binding{}, false
	}
	defer g.RUnlock()
	e := r.find(h, session)
	if e == nil {
		return Binding{}, false
	}
	now := r.now()
	e.mu.Lock()
	if !e.ended && e.due.Load() > now {
		if e.version != version {
			e.mu.Unlock()
			return Binding{}, false
		}
		b := r.binding(e)
		r.finish(e, 0)
		e.mu.Unlock()
		r.roster.remove(e)
		r.detach(e)
		return b, true
	}
	e.mu.Unlock()
	if r.expire(e, now) {
		r.detach(e)
	}
	return Binding{}, false
}

// Len implements [Store].
func (r *Ristretto) Len() int {
	n, _ := r.roster.size()
	return n
}

// Bytes implements [Store].
func (r *Ristretto) Bytes() int64 {
	_, b := r.roster.size()
	return b
}

// SetLimits changes the bounds of a store in use; zero or less stands for the default. It
// evicts the bindings that no longer fit before it returns, each time the longest idle of
// a random sample. After Close it does nothing.
func (r *Ristretto) SetLimits(maxSessions int, maxBytes int64) {
	maxSessions, maxBytes = limits(maxSessions, maxBytes)
	r.limitsMu.Lock()
	defer r.limitsMu.Unlock()
	g, ok := r.enter(0)
	if !ok {
		return
	}
	defer g.RUnlock()
	// It is never lowered: it need only stay above our bound.
	if c := headroom(maxSessions); c > r.cache.MaxCost() {
		r.cache.UpdateMaxCost(c)
	}
	r.queue.setLimits(maxSessions, maxBytes)
	r.roster.setLimits(maxSessions, maxBytes)
	defer r.roster.shrunk()
	now := r.now()
	for {
		e, used := r.roster.over(now)
		if e == nil {
			return
		}
		if r.evict(e, used, now, false) {
			r.detach(e)
		}
	}
}

// Close implements [Store]. It waits for current operations and the current OnExpire call,
// so OnExpire must not call it.
func (r *Ristretto) Close() error {
	r.closeOnce.Do(func() {
		for i := range r.gates {
			r.gates[i].Lock()
		}
		r.closed = true
		for i := range r.gates {
			r.gates[i].Unlock()
		}
		// No operation is running, and none can begin.
		close(r.stop)
		<-r.swept
		r.queue.close()
		for _, e := range r.roster.drain() {
			e.mu.Lock()
			e.ended = true
			e.mu.Unlock()
		}
		r.cache.Close()
	})
	return nil
}

// Interface guard
var _ Store = (*Ristretto)(nil)
