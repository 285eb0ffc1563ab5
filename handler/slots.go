package handler

import (
	"math"
	"sync/atomic"
)

// slots count the inference attempts that are under way at one dial address,
// and bound them. They stay the same when the worker there gets another id.
type slots struct {
	running atomic.Int64
	limit   atomic.Int64 // 0 = none
}

// full tells whether the worker has as many attempts as it may have.
func (s *slots) full() bool {
	limit := s.limit.Load()
	return limit > 0 && s.running.Load() >= limit
}

// room returns how many slots are free.
func (s *slots) room() int64 {
	limit := s.limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.running.Load()
}

// take takes a slot and tells whether there was one.
func (s *slots) take() bool {
	for {
		n := s.running.Load()
		if limit := s.limit.Load(); limit > 0 && n >= limit {
			return false
		}
		if s.running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// freeSlot gives a slot of the worker back, to whoever waits for it.
func (p *pool) freeSlot(w *worker) {
	w.slots.running.Add(-1)
	p.queue.freed(w)
}

// takeSlot takes a slot of the chosen worker for an attempt. It returns false
// if the worker filled up meanwhile, or a queued request has first claim to its room.
func (rt *route) takeSlot(w *worker) bool {
	switch {
	case !rt.plan.computes:
		return true
	case w == rt.wait.granted:
		rt.wait.granted = nil
		return true
	}
	return rt.pool.queue.takeUnclaimed(w)
}

// giveBackGranted frees the slot that the queue has granted, if it was not used.
func (rt *route) giveBackGranted() {
	if w := rt.wait.granted; w != nil {
		rt.wait.granted = nil
		rt.pool.freeSlot(w)
	}
}
