package affinity

import (
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/ristretto/v2"
)

// What zero values in [Options] and [Ristretto.SetLimits] stand for.
const (
	DefaultMaxSessions = 1_000_000
	DefaultMaxBytes    = 256 << 20
	DefaultSweep       = 5 * time.Second
)

// Options are the settings of [NewRistretto]. The zero value is usable.
type Options struct {
	// MaxSessions bounds the number of bindings. Default: 1,000,000.
	MaxSessions int

	// MaxBytes bounds the memory of the bindings, in bytes, as estimated by
	// Bytes; a binding takes about 300 bytes and its session id. It does not
	// include a fixed part of about 1 MiB. Default: 256 MiB.
	MaxBytes int64

	// Sweep is how often expired bindings are looked for. It bounds how late
	// an expiry is reported, not how long a binding is used. Default: 5s.
	Sweep time.Duration

	// Clock tells the time and must be safe for concurrent use. Default:
	// time.Now, whose monotonic part makes lifetimes independent of clock changes.
	Clock func() time.Time

	// OnExpire is told of the end of each EngineBacked binding that nobody
	// asked for: expired, evicted, or replaced by a binding to another target.
	// It is called exactly once for each such end, one call at a time and in
	// order for a session, from a goroutine that holds no lock; it may use the
	// store, except for Close. Ends not yet reported when Close is called are
	// forgotten, and there is no call after Close has returned.
	//
	// The session may have been bound again since. Who releases the engine's
	// side should Peek first, and leave alone a session which is back on the
	// same target. A slow OnExpire delays later ones; when
	// EngineBacked bindings and unreported ends together reach twice the
	// limits and 1,024 more, further EngineBacked bindings are refused with
	// ErrFull. Default: nobody is told.
	OnExpire func(session string, b Binding, why Reason)
}

// Ristretto is a [Store] in memory. It uses ristretto as a concurrent map and
// for nothing else: deadlines, the choice of what makes room and the bounds
// are its own, because ristretto's admission prefers frequent to recent keys,
// drops writes under load and may delete a key while it is being renewed.
type Ristretto struct {
	cache   *ristretto.Cache[uint64, *entry]
	hash    func(session string) uint64
	clock   func() time.Time // nil for the process's own
	start   time.Time
	version atomic.Uint64
	queue   *queue
	roster  roster

	// stripes order those who change which entry the cache holds for a hash.
	// They are held over calls of the cache, which may wait for ristretto's
	// goroutine; that one takes none of them.
	stripes [256]paddedMutex

	// gates are held shared by every operation, so that the cache cannot be
	// closed under it. They are many only to spare the cores one contended
	// word. closed changes while all are held.
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

// NewRistretto returns an empty store. Whoever owns it must Close it. The
// error is ristretto's refusal of its settings.
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
		// The counters steer an eviction that does not happen.
		NumCounters:        1 << 14,
		MaxCost:            headroom(o.MaxSessions),
		BufferItems:        64,
		IgnoreInternalCost: true,
		// Identity, and no second hash: entries know their session.
		KeyToHash: func(h uint64) (uint64, uint64) { return h, 0 },
		OnEvict:   r.onEvict,
		// Nothing is stored with ristretto's own expiry.
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

// headroom is ristretto's bound for ours. Besides the entries held it counts
// those whose deletion waits in its buffer, which has 32,768 places, and those
// which have ended but are not detached yet.
func headroom(maxSessions int) int64 {
	return int64(maxSessions) + int64(maxSessions)/8 + 1<<17
}

// onEvict keeps the store right should ristretto evict nevertheless. It runs
// on ristretto's goroutine, so it must not wait for anybody who waits for
// ristretto; and ristretto passes no value for a key that was deleted.
func (r *Ristretto) onEvict(item *ristretto.Item[*entry]) {
	if e := item.Value; e != nil {
		r.evict(e, 0, r.now(), true)
	}
}

// now returns the nanoseconds since the store was made.
func (r *Ristretto) now() int64 {
	if r.clock == nil {
		return int64(time.Since(r.start)) // it reads one clock where time.Now reads two
	}
	return int64(r.clock().Sub(r.start))
}

func (r *Ristretto) stripe(hash uint64) *paddedMutex {
	return &r.stripes[hash%uint64(len(r.stripes))]
}

// enter begins an operation. It returns false if the store is closed, and
// otherwise what the caller must RUnlock.
func (r *Ristretto) enter(hash uint64) (*paddedRWMutex, bool) {
	g := &r.gates[hash%uint64(len(r.gates))]
	g.RLock()
	if r.closed {
		g.RUnlock()
		return nil, false
	}
	return g, true
}

// find returns the session's entry, which may have ended, or nil.
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

// SetLimits changes the bounds of a store in use; zero or less stands for the
// default. Bindings that no longer fit are evicted before it returns, longest
// idle first, as far as a random sample can tell. After Close it does nothing.
func (r *Ristretto) SetLimits(maxSessions int, maxBytes int64) {
	maxSessions, maxBytes = limits(maxSessions, maxBytes)
	r.limitsMu.Lock()
	defer r.limitsMu.Unlock()
	g, ok := r.enter(0)
	if !ok {
		return
	}
	defer g.RUnlock()
	// Only ever raised: it is not the bound, it must stay above it.
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

// Close implements [Store]. It waits for the operations and the OnExpire call
// at work, so it must not be called from OnExpire.
func (r *Ristretto) Close() error {
	r.closeOnce.Do(func() {
		for i := range r.gates {
			r.gates[i].Lock()
		}
		r.closed = true
		for i := range r.gates {
			r.gates[i].Unlock()
		}
		// Nobody is inside any more, and nobody comes in.
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
