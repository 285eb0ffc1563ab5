package affinity

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// maxTTL bounds a time to live, so that adding it to the clock cannot overflow.
const maxTTL = 100 * 365 * 24 * time.Hour

// entryBytes is the memory of a binding in bytes: the entry, ristretto's two maps, the roster
// and the table of recent entries. Go's maps grow by doubling, so this is an upper bound. TestBytesMatchesHeap
// measures it.
const entryBytes = 288

// entry holds a session's binding. The maps only find entries: one that has ended counts as
// absent. All changes happen under mu, so use, renewal, replacement and end of a binding
// are ordered, and only one caller ends it.
//
// Code that holds mu takes no other lock than those of the queue and of backed.
type entry struct {
	key   Key
	scope uint32

	// slot is the index in the roster, negative outside of it. The roster's lock guards it.
	slot int32

	// Written under mu, read without it. In nanoseconds of the store's clock.
	due  atomic.Int64
	used atomic.Int64

	mu      sync.Mutex
	worker  uint64
	ttl     time.Duration
	version Version
	rank    uint32 // beside the small fields, so that an entry has 80 bytes
	kind    Kind
	ended   bool
}

// hash returns what ristretto finds the entry by. Keys are keyed hashes, so a part of one is
// as good as a further hash.
func (k *Key) hash() uint64 { return binary.LittleEndian.Uint64(k[:]) }

// set gives the entry a binding. The caller holds mu, or has the only reference.
func (r *Ristretto) set(e *entry, w *write) {
	if e.kind == EngineBacked {
		r.backed.remove(e.version)
	}
	version := r.next()
	if w.Kind == EngineBacked {
		r.backed.add(version, e.key, w.EngineSession)
	}
	e.worker, e.rank = w.Target.Worker, w.Target.Rank
	e.kind = w.Kind
	e.ttl = w.TTL
	e.version = version
	e.used.Store(w.now - w.idle)
	e.due.Store(w.now - w.idle + int64(w.TTL))
}

// target returns what the entry is bound to. The caller holds mu.
func (e *entry) target() kvscore.Target { return kvscore.Target{Worker: e.worker, Rank: e.rank} }

// slide restarts the time to live. The caller holds mu. It never shortens a life: of two
// concurrent uses, the one that read the clock first may come last.
func (e *entry) slide(now int64) {
	if now <= e.used.Load() {
		return
	}
	e.used.Store(now)
	e.due.Store(now + int64(e.ttl))
}

// binding returns the binding as of now. The caller holds e.mu.
func (r *Ristretto) binding(e *entry) Binding {
	b := Binding{
		Want:    Want{Target: e.target(), TTL: e.ttl, Scope: e.scope, Kind: e.kind},
		Expires: r.start.Add(time.Duration(e.due.Load())),
		Version: e.version,
	}
	if e.kind == EngineBacked {
		b.EngineSession = r.backed.id(e.version)
	}
	return b
}

// lock locks the entry's mu and returns whether its binding is alive. An overdue binding
// that a live request uses slides, and is alive. If the binding is overdue, lock ends it.
// The caller unlocks mu and holds no stripe.
func (r *Ristretto) lock(e *entry, now int64) (alive bool) {
	e.mu.Lock()
	if e.ended || e.due.Load() > now {
		return !e.ended
	}
	e.mu.Unlock()
	if r.expire(e, now) {
		r.detach(e)
	}
	e.mu.Lock()
	return !e.ended && e.due.Load() > now
}

// inUse returns whether live requests use the binding of a version. The caller holds no
// lock.
func (r *Ristretto) inUse(e *entry, v Version) bool {
	live := r.live.Load()
	return live != nil && (*live)(e.key, v)
}

// finish ends the entry, which must not have ended. It reports the end unless the reason is
// 0. The caller holds e.mu. Afterwards it removes the entry from the roster and, holding
// no stripe, from the cache.
func (r *Ristretto) finish(e *entry, why Reason) {
	e.ended = true
	r.ends[why].Add(1)
	if e.kind != EngineBacked {
		return
	}
	defer r.backed.remove(e.version)
	if why == 0 {
		r.queue.settle()
		return
	}
	// Under the entry's lock, so that ends of one session keep their order.
	r.queue.push(event{key: e.key, binding: r.binding(e), why: why})
}

// expire ends an overdue entry unless live requests use its binding. It returns whether this
// call ended it.
func (r *Ristretto) expire(e *entry, now int64) bool {
	e.mu.Lock()
	v := e.version
	overdue := !e.ended && e.due.Load() <= now
	e.mu.Unlock()
	if !overdue {
		return false
	}
	used := r.inUse(e, v)
	e.mu.Lock()
	// A use or another call may have come between.
	if e.ended || e.version != v || e.due.Load() > now {
		e.mu.Unlock()
		return false
	}
	if used {
		e.slide(now)
		e.mu.Unlock()
		return false
	}
	r.finish(e, Expired)
	e.mu.Unlock()
	r.roster.remove(e)
	return true
}

// pressure says which entries an eviction spares.
type pressure uint8

const (
	polite pressure = iota // those used after the roster chose them, and those in use
	urgent                 // those in use by live requests
	force                  // none
)

// evict ends the entry to make room. It returns whether this call ended it. used is the
// entry's last use when the roster chose it.
func (r *Ristretto) evict(e *entry, used, now int64, p pressure) bool {
	e.mu.Lock()
	v, ended := e.version, e.ended
	e.mu.Unlock()
	if ended {
		// The call that ended it may not have removed it yet, and its place is needed.
		r.roster.remove(e)
		return false
	}
	live := p != force && r.inUse(e, v)
	e.mu.Lock()
	switch {
	case e.ended:
		e.mu.Unlock()
		return false
	case live && e.version == v:
		e.slide(now) // so that the next sample passes over it
		e.mu.Unlock()
		return false
	case p == polite && e.used.Load() != used, p != force && e.version != v:
		e.mu.Unlock()
		return false
	}
	why := Evicted
	if e.due.Load() <= now {
		why = Expired
	}
	r.finish(e, why)
	e.mu.Unlock()
	r.roster.remove(e)
	return true
}

// detach removes an ended entry from the cache, unless a newer one has replaced it. The
// caller holds no stripe.
func (r *Ristretto) detach(e *entry) {
	h := e.key.hash()
	s := r.stripe(h)
	s.Lock()
	defer s.Unlock()
	r.recent.drop(e)
	if r.lookup(s, h) == e {
		r.cache.Del(h)
	}
}
