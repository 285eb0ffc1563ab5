package affinity

import (
	"encoding/binary"
	"time"
)

// maxTTL bounds a time to live, so that adding it to the clock cannot overflow.
const maxTTL = 100 * 365 * 24 * time.Hour

// entryBytes is the memory of a binding in bytes: the entry, ristretto's two maps and the
// roster. Go's maps grow by doubling, so this is an upper bound. TestBytesMatchesHeap measures
// it.
const entryBytes = 272

// entry holds a session's binding. The store's lock guards it.
type entry struct {
	Want
	key     Key
	used    int64 // in nanoseconds of the store's clock
	version Version
	slot    int32 // the index in the roster
}

// hash returns what ristretto finds the entry by. Keys are keyed hashes, so a part of one is
// as good as a further hash.
func (k *Key) hash() uint64 { return binary.LittleEndian.Uint64(k[:]) }

func (e *entry) set(w *write, v Version) {
	w.Scope = e.Scope // the roster counts it
	e.Want, e.version = w.Want, v
	e.used = w.now - w.idle
}

// due returns when the binding ends if it is not used before.
func (e *entry) due() int64 { return e.used + int64(e.TTL) }

// slide restarts the time to live, and returns true. A restored binding may have been used later than now.
func (e *entry) slide(now int64) bool {
	e.used = max(e.used, now)
	return true
}

func (r *Bindings) binding(e *entry) Binding {
	return Binding{Want: e.Want, Expires: r.start.Add(time.Duration(e.due())), Version: e.version}
}

// find returns the session's live entry, nil if it has none. The caller holds mu, as for all
// methods below.
func (r *Bindings) find(key *Key, now int64) *entry {
	if r.closed { // Close may be closing the cache, whose Get then panics
		return nil
	}
	if e, _ := r.cache.Get(key.hash()); e != nil && e.key == *key && r.lives(e, now) {
		return e
	}
	return nil
}

// lives returns whether an entry is live. An overdue binding that a live request uses slides.
// Otherwise lives ends it.
func (r *Bindings) lives(e *entry, now int64) bool {
	switch {
	case e.due() > now:
	case r.uses(e):
		e.slide(now)
	default:
		r.finish(e, Expired)
		return false
	}
	return true
}

func (r *Bindings) uses(e *entry) bool { return r.active[e.key] != nil }

// finish ends the entry's binding and removes the entry. It reports the end unless the reason is 0. It
// returns true.
func (r *Bindings) finish(e *entry, why Reason) bool {
	r.ends[why]++
	if why != 0 {
		r.report(e, why)
	}
	r.roster.remove(e)
	r.cache.Del(e.key.hash())
	return true
}

// evict ends the entry's binding to make room. Unless forced, it spares one that live requests
// use, and returns false.
func (r *Bindings) evict(e *entry, now int64, force bool) bool {
	if !force && r.uses(e) {
		e.slide(now) // so that the next sample passes over it
		return false
	}
	why := Evicted
	if e.due() <= now {
		why = Expired
	}
	r.finish(e, why)
	return true
}
