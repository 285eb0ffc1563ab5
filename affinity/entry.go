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

// entryBytes is the memory of a binding in bytes: the entry, ristretto's two maps and the
// roster. Go's maps grow by doubling, so this is an upper bound. TestBytesMatchesHeap measures
// it.
const entryBytes = 272

// entry holds a session's binding. The maps only find entries: one that has ended counts as
// absent. All changes happen under mu, so use, renewal, replacement and end of a binding
// are ordered, and only one caller ends it.
//
// Code that holds mu may take the locks of the roster, the queue and the live requests. It
// does not take the store's lock for writes.
type entry struct {
	key   Key
	scope uint32

	// slot is the index in the roster, negative outside of it. The roster's lock guards it.
	slot int32

	// Written under mu, read without it. In nanoseconds of the store's clock.
	due  atomic.Int64
	used atomic.Int64

	mu            sync.Mutex
	worker        uint64
	ttl           time.Duration
	version       Version
	engineSession string
	rank          uint32 // beside the small fields, so that an entry has 96 bytes
	kind          Kind
	ended         bool
}

// hash returns what ristretto finds the entry by. Keys are keyed hashes, so a part of one is
// as good as a further hash.
func (k *Key) hash() uint64 { return binary.LittleEndian.Uint64(k[:]) }

// set gives the entry a binding of a version. The caller holds mu, or has the only reference.
func (e *entry) set(w *write, v Version) {
	e.worker, e.rank = w.Target.Worker, w.Target.Rank
	e.kind, e.engineSession = w.Kind, w.EngineSession
	e.ttl = w.TTL
	e.version = v
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
func (r *Bindings) binding(e *entry) Binding {
	return Binding{
		Want:    Want{Target: e.target(), TTL: e.ttl, Scope: e.scope, Kind: e.kind, EngineSession: e.engineSession},
		Expires: r.start.Add(time.Duration(e.due.Load())),
		Version: e.version,
	}
}

// visit calls f with a live entry, under its lock, and returns whether it is live. An overdue binding that a live request uses slides. Otherwise visit ends it.
func (r *Bindings) visit(e *entry, now int64, f func()) (live bool) {
	e.mu.Lock()
	if !e.ended && e.due.Load() <= now {
		if r.live.use(e.key, e.version) {
			e.slide(now)
		} else {
			r.finish(e, Expired)
		}
	}
	if live = !e.ended; live {
		f()
	}
	ended := e.ended
	e.mu.Unlock()
	if ended {
		r.detach(e)
	}
	return live
}

// finish ends the entry, which must not have ended. It reports the end unless the reason is
// 0. The caller holds e.mu, and afterwards detaches the entry.
func (r *Bindings) finish(e *entry, why Reason) {
	e.ended = true
	r.ends[why].Add(1)
	if e.kind == EngineBacked && why != 0 {
		// Under the entry's lock, so that ends of one session keep their order.
		r.queue.push(&event{key: e.key, binding: r.binding(e), why: why})
	}
	r.roster.remove(e)
}

// evict ends the entry to make room. Unless forced, it spares a binding that live requests
// use. It returns whether this call ended the entry, which the caller then detaches.
func (r *Bindings) evict(e *entry, now int64, force bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return false
	}
	if !force && r.live.use(e.key, e.version) {
		e.slide(now) // so that the next sample passes over it
		return false
	}
	why := Evicted
	if e.due.Load() <= now {
		why = Expired
	}
	r.finish(e, why)
	return true
}

// detach removes an ended entry from the cache.
func (r *Bindings) detach(e *entry) {
	r.writes.Lock()
	defer r.writes.Unlock()
	r.forget(e)
}

// forget is detach for a caller that holds writes. A newer entry may have replaced e.
func (r *Bindings) forget(e *entry) {
	if cur, _ := r.cache.Get(e.key.hash()); cur == e {
		r.cache.Del(e.key.hash())
	}
}
