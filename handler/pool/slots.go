package pool

import (
	"math"
	"sync/atomic"
)

// slots count and bound the inference attempts at one dial address. They stay when the
// worker there gets another id.
type slots struct {
	Running atomic.Int64
	Limit   atomic.Int64 // 0 = none
}

// full returns whether no slot is free.
func (s *slots) full() bool {
	limit := s.Limit.Load()
	return limit > 0 && s.Running.Load() >= limit
}

// room returns how many slots are free.
func (s *slots) room() int64 {
	limit := s.Limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.Running.Load()
}

// Take takes a slot. It returns false if none is free.
func (s *slots) Take() bool {
	for {
		n := s.Running.Load()
		if limit := s.Limit.Load(); limit > 0 && n >= limit {
			return false
		}
		if s.Running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// FreeSlot frees a slot of the worker for the queue.
func (p *Pool) FreeSlot(w *Worker) {
	w.Slots.Running.Add(-1)
	p.Queue.freed(w)
}
