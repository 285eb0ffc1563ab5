package worker

import (
	"math"
	"sync/atomic"
)

// Running returns how many inference requests the worker runs, and how many it may; 0 is no
// limit.
func (w *Worker) Running() (n, limit int64) { return w.slots.running.Load(), w.slots.limit.Load() }

// TakeSlot takes a slot. It returns false if none is free.
func (w *Worker) TakeSlot() bool { return w.slots.take() }

// FreeSlot gives a slot back.
func (w *Worker) FreeSlot() { w.slots.running.Add(-1) }

// FreeSlots returns how many slots are free.
func (w *Worker) FreeSlots() int64 { return w.slots.room() }

// IsFull returns whether no slot is free.
func (w *Worker) IsFull() bool { return w.slots.room() <= 0 }

// RunElsewhere counts n more requests of other routers.
func (w *Worker) RunElsewhere(n int64) { w.slots.others.Add(n) }

// slots count and bound the inference attempts at one dial address. They stay when its
// worker gets another id.
type slots struct {
	running atomic.Int64
	others  atomic.Int64 // of other routers
	limit   atomic.Int64 // 0 = none
}

// room returns how many slots are free.
func (s *slots) room() int64 {
	limit := s.limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.running.Load() - s.told(limit)
}

// told returns how many of the slots count as taken by other routers. An eighth stays, at least one
// of several: else who writes false reports to the stream of share could stop all service.
func (s *slots) told(limit int64) int64 { return min(s.others.Load(), limit-(limit+6)/8) }

// take takes a slot. It returns false if none is free.
func (s *slots) take() bool {
	for {
		n := s.running.Load()
		if limit := s.limit.Load(); limit > 0 && n+s.told(limit) >= limit {
			return false
		}
		if s.running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}
