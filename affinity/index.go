package affinity

import (
	"sync"
	"sync/atomic"
)

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

	// Every operation that uses the cache holds a gate for reading, so that Close cannot
	// close the cache meanwhile. Each stripe has one, to avoid one contended word. Close
	// holds all of them to set closed.
	gate sync.RWMutex

	_ [56]byte
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
			r.evict(e, r.now(), true) // ristretto has refused it, or it has ended
		}
	}
	s.freshMu.Lock()
	s.settled.Add(1)
	clear(s.fresh)
	s.fresh = s.fresh[:0]
	s.freshMu.Unlock()
}
