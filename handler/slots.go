package handler

import (
	"math"
	"sync/atomic"
)

// slots count and bound the inference attempts at one dial address. They stay when the
// worker there gets another id.
type slots struct {
	running atomic.Int64
	limit   atomic.Int64 // 0 = none
}

// full returns whether no slot is free.
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

// take takes a slot. It returns false if none is free.
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

// freeSlot frees a slot of the worker for the queue.
func (p *pool) freeSlot(w *worker) {
	w.slots.running.Add(-1)
	p.queue.freed(w)
}
