package affinity

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// maxTTL bounds a time to live, so that adding it to the clock cannot overflow.
const maxTTL = 100 * 365 * 24 * time.Hour

// entryOverhead is what one binding takes in memory besides its session id, in
// bytes: the entry, ristretto's two maps and the roster. Go's maps grow by
// doubling, so this is an upper figure; TestBytesMatchesHeap measures it.
const entryOverhead = 288

// An entry is the one place that knows a session's binding. The maps only find
// it: an entry which is in them but ended counts as absent. All changes happen
// under mu, so use, renewal, replacement and end of a binding are ordered, and
// only one of those who want to end it does.
//
// No other lock than the queue's is taken under mu.
type entry struct {
	session string
	hash    uint64

	// slot is the index in the roster, negative outside of it. It belongs to
	// the roster's lock.
	slot int

	// Written under mu, readable without. In nanoseconds of the store's clock.
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

// set gives the entry a binding. The caller holds mu, or is alone.
func (e *entry) set(w *write, version uint64) {
	e.target = w.target
	e.kind = w.kind
	e.ttl = w.ttl
	e.version = version
	e.used.Store(w.now)
	e.due.Store(w.now + int64(w.ttl))
}

// slide starts the time to live anew. The caller holds mu. It never shortens a
// life: of two concurrent uses the one that read the clock first may be last.
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

// finish ends the entry; a reason of 0 means that the end is not reported. The
// caller holds e.mu, has seen that the entry has not ended, and afterwards
// takes it off the roster and, holding no stripe, out of the cache.
func (r *Ristretto) finish(e *entry, why Reason) {
	e.ended = true
	if e.kind != EngineBacked {
		return
	}
	if why == 0 {
		r.queue.settle(e.cost())
		return
	}
	// Under the entry's lock, so that two ends of one session are reported in
	// their order.
	r.queue.push(event{session: e.session, binding: r.binding(e), why: why})
}

// expire ends the entry if it is overdue, and returns whether this call did.
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

// evict ends the entry to make room, and returns whether this call did. Unless
// forced, it spares an entry that was used since the roster chose it.
func (r *Ristretto) evict(e *entry, used, now int64, force bool) bool {
	e.mu.Lock()
	if e.ended {
		e.mu.Unlock()
		// Who ended it may not have come to this yet, and its place is needed.
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

// detach takes an ended entry out of the cache, unless a newer one has taken
// its place. The caller holds no stripe.
func (r *Ristretto) detach(e *entry) {
	s := r.stripe(e.hash)
	s.Lock()
	defer s.Unlock()
	if cur, ok := r.cache.Get(e.hash); ok && cur == e {
		r.cache.Del(e.hash)
	}
}
