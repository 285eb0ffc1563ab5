package affinity

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// maxTTL bounds a time to live, so that adding it to the clock cannot overflow.
const maxTTL = 100 * 365 * 24 * time.Hour

// entryOverhead is the memory of a binding without its session id, in bytes: the entry,
// ristretto's two maps and the roster. Go's maps grow by doubling, so this is an upper
// bound. TestBytesMatchesHeap measures it.
const entryOverhead = 288

// entry holds a session's binding. The maps only find entries: one that has ended counts as
// absent. All changes happen under mu, so use, renewal, replacement and end of a binding
// are ordered, and only one caller ends it.
//
// Code that holds mu takes no other lock than the queue's.
type entry struct {
	session string
	hash    uint64

	// slot is the index in the roster, negative outside of it. The roster's lock guards it.
	slot int

	// Written under mu, read without it. In nanoseconds of the store's clock.
	due  atomic.Int64
	used atomic.Int64

	mu      sync.Mutex
	target  kvscore.Target
	ttl     time.Duration
	version uint64
	kind    Kind
	ended   bool
}

func (e *entry) cost() int64 {
	return entryOverhead + int64(len(e.session))
}

// set gives the entry a binding. The caller holds mu, or has the only reference.
func (e *entry) set(w *write, version uint64) {
	e.target = w.target
	e.kind = w.kind
	e.ttl = w.ttl
	e.version = version
	e.used.Store(w.now)
	e.due.Store(w.now + int64(w.ttl))
}

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
	return Binding{
		Target:  e.target,
		Kind:    e.kind,
		TTL:     e.ttl,
		Expires: r.start.Add(time.Duration(e.due.Load())),
		Version: e.version,
	}
}

// finish ends the entry, which must not have ended. It reports the end unless the reason is
// 0. The caller holds e.mu. Afterwards it removes the entry from the roster and, holding
// no stripe, from the cache.
func (r *Ristretto) finish(e *entry, why Reason) {
	e.ended = true
	if e.kind != EngineBacked {
		return
	}
	if why == 0 {
		r.queue.settle(e.cost())
		return
	}
	// Under the entry's lock, so that ends of one session keep their order.
	r.queue.push(event{session: e.session, binding: r.binding(e), why: why})
}

// expire ends an overdue entry. It returns whether this call ended it.
func (r *Ristretto) expire(e *entry, now int64) bool {
	e.mu.Lock()
	if e.ended || e.due.Load() > now {
		e.mu.Unlock()
		return false
	}
	r.finish(e, Expired)
	e.mu.Unlock()
	r.roster.remove(e)
	return true
}

// evict ends the entry to make room. It returns whether this call ended it. Without force,
// it keeps an entry that was used after the roster chose it.
func (r *Ristretto) evict(e *entry, used, now int64, force bool) bool {
	e.mu.Lock()
	if e.ended {
		e.mu.Unlock()
		// The call that ended it may not have removed it yet, and its place is needed.
		r.roster.remove(e)
		return false
	}
	why := Evicted
	switch {
	case e.due.Load() <= now:
		why = Expired
	case !force && e.used.Load() != used:
		e.mu.Unlock()
		return false
	}
	r.finish(e, why)
	e.mu.Unlock()
	r.roster.remove(e)
	return true
}

// detach removes an ended entry from the cache, unless a newer one has replaced it. The
// caller holds no stripe.
func (r *Ristretto) detach(e *entry) {
	s := r.stripe(e.hash)
	s.Lock()
	defer s.Unlock()
	if cur, ok := r.cache.Get(e.hash); ok && cur == e {
		r.cache.Del(e.hash)
	}
}
