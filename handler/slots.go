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
// if the choice must be made anew: the worker filled up meanwhile, or its room
// is that of a request that came first.
func (rt *route) takeSlot(w *worker) bool {
	reserved := rt.wait.reserved
	switch {
	case !rt.plan.computes:
		return true
	case reserved == nil:
		return w.slots.take()
	case w == reserved:
		rt.wait.reserved = nil
		return true
	case rt.pool.queue.takeBeside(w):
		rt.giveBackReserved()
		return true
	}
	return false
}

// giveBackReserved gives back the slot that was reserved for the request, if
// there is one.
func (rt *route) giveBackReserved() {
	if w := rt.wait.reserved; w != nil {
		rt.wait.reserved = nil
		rt.pool.freeSlot(w)
	}
}

// onlyReserved leaves no candidates but those of the worker that has a slot
// reserved for the request. It returns false if there is no such slot.
func (rt *route) onlyReserved() bool {
	reserved, n := rt.wait.reserved, 0
	if reserved == nil {
		return false
	}
	for i, w := range rt.scratch.workers {
		if w == reserved {
			rt.scratch.targets[n], rt.scratch.upstreams[n], rt.scratch.workers[n] = rt.scratch.targets[i], rt.scratch.upstreams[i], w
			n++
		}
	}
	rt.scratch.targets, rt.scratch.upstreams, rt.scratch.workers = rt.scratch.targets[:n], rt.scratch.upstreams[:n], rt.scratch.workers[:n]
	return n > 0
}
