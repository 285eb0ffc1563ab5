package affinity

import (
	"sync"
	"sync/atomic"
)

// recent is a table of the entries used last, by hash. Reads look here first, because
// ristretto's Get costs several times as much: it visits more memory, and records every
// access for its own eviction.
//
// The table is lossy: an entry displaces an older one of its place, and a resize loses all. A
// place may also keep an entry that has ended. Both are harmless. The cache has every entry,
// and a session has at most one that has not ended.
type recent struct {
	places atomic.Pointer[[]place] // their number is a power of two
}

// place holds the last two entries of some hashes, the later one first.
type place [2]atomic.Pointer[entry]

// minPlaces is the smallest number of places.
const minPlaces = 1 << 10

func (t *recent) place(hash uint64) *place {
	places := *t.places.Load()
	return &places[hash&uint64(len(places)-1)]
}

// find returns an entry of the session or nil. The entry may have ended.
func (t *recent) find(key *Key) *entry {
	p := t.place(key.hash())
	for i := range p {
		if e := p[i].Load(); e != nil && e.key == *key {
			return e
		}
	}
	return nil
}

// put makes the table find the entry. It loses another one if two calls come at once.
func (t *recent) put(e *entry) {
	p := t.place(e.key.hash())
	if old := p[0].Load(); old != e {
		p[1].Store(old)
		p[0].Store(e)
	}
}

// drop frees the memory of an entry that has ended.
func (t *recent) drop(e *entry) {
	p := t.place(e.key.hash())
	for i := range p {
		if p[i].Load() == e {
			p[i].CompareAndSwap(e, nil)
		}
	}
}

// fit gives the table one to four places, 16 to 64 bytes, for each entry.
func (t *recent) fit(entries int) {
	size, old := minPlaces, 0
	if places := t.places.Load(); places != nil {
		old = len(*places)
	}
	for size < entries {
		size *= 2
	}
	if size > old || 4*size <= old {
		places := make([]place, size)
		t.places.Store(&places)
	}
}

// maxFresh is the number of fresh entries at which a stripe waits for ristretto.
const maxFresh = 16

// stripe is a part of the hashes. Its lock orders changes of the cache's entry for a hash. A
// caller holds it during calls of the cache, which may wait for ristretto's goroutine. That
// goroutine takes no stripe.
type stripe struct {
	sync.Mutex

	// fresh are the entries that ristretto has queued. It finds each of them soon, but does
	// not say when, and to wait for each is slow. An entry leaves the list only when
	// ristretto finds it or when it has ended. Until then, a change of the same hash must
	// settle the stripe first: ristretto's queue would apply some changes in the wrong order.
	freshMu sync.Mutex // held only briefly, so that reads need not wait for ristretto
	fresh   []*entry
	settled atomic.Uint64 // how often fresh was emptied

	_ [16]byte
}

// queued returns the fresh entry of a hash or nil.
func (s *stripe) queued(hash uint64) *entry {
	s.freshMu.Lock()
	defer s.freshMu.Unlock()
	for _, e := range s.fresh {
		if e.key.hash() == hash {
			return e
		}
	}
	return nil
}

// lookup returns the entry of a hash or nil. The entry may have ended. The caller holds the
// stripe, and may change the hash's entry afterwards.
func (r *Ristretto) lookup(s *stripe, hash uint64) *entry {
	if s.queued(hash) != nil {
		r.settle(s)
	}
	e, _ := r.cache.Get(hash)
	return e
}

// find returns the session's entry or nil. The entry may have ended. The caller need not hold
// the stripe.
func (r *Ristretto) find(key *Key) *entry {
	h := key.hash()
	s := r.stripe(h)
	settled := s.settled.Load()
	e, ok := r.cache.Get(h)
	if !ok {
		if e = s.queued(h); e == nil && s.settled.Load() != settled {
			e, _ = r.cache.Get(h)
		}
	}
	if e == nil || e.key != *key {
		return nil
	}
	return e
}

// store makes the cache find the entry. It returns false if ristretto did not take it. The
// caller holds the stripe and has looked the hash up.
//
// Ristretto replaces a value at once, but queues a new key, and drops it if the queue is full.
func (r *Ristretto) store(s *stripe, e *entry) bool {
	h := e.key.hash()
	for range maxSets {
		if !r.cache.Set(h, e, 1) {
			r.cache.Wait()
			continue
		}
		s.freshMu.Lock()
		s.fresh = append(s.fresh, e)
		n := len(s.fresh)
		s.freshMu.Unlock()
		if n >= maxFresh {
			r.settle(s)
		}
		return true
	}
	return false
}

// settle waits until ristretto finds the stripe's fresh entries. The caller holds the stripe.
func (r *Ristretto) settle(s *stripe) {
	r.cache.Wait()
	for _, e := range s.fresh { // which only holders of the stripe change
		if cur, ok := r.cache.Get(e.key.hash()); !ok || cur != e {
			r.evict(e, 0, r.now(), force) // ristretto has refused it, or it has ended
		}
	}
	s.freshMu.Lock()
	s.settled.Add(1)
	clear(s.fresh)
	s.fresh = s.fresh[:0]
	s.freshMu.Unlock()
}
