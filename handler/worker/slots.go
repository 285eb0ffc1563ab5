package worker

import (
	"math"
	"sync/atomic"
	"time"
)

// Running returns how many inference requests the worker runs, and how many it may; 0 is no
// limit.
func (s *slots) Running() (n, limit int64) { return s.running.Load(), s.limit.Load() }

// FreeSlot gives a slot back.
func (s *slots) FreeSlot() { s.running.Add(-1) }

// RunElsewhere counts n more requests of other routers.
func (s *slots) RunElsewhere(n int64) { s.others.Add(n) }

// slots count and bound the inference attempts at one dial address. They stay when its
// worker gets another id.
type slots struct {
	running atomic.Int64
	others  atomic.Int64 // of other routers
	limit   atomic.Int64 // 0 = none
}

// FreeSlots returns how many slots are free.
func (s *slots) FreeSlots() int64 {
	limit := s.limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.running.Load() - s.told(limit)
}

// told returns how many of the slots count as taken by other routers. An eighth stays, at least one
// of several: else who writes false reports to the stream of share could stop all service.
func (s *slots) told(limit int64) int64 { return min(s.others.Load(), limit-(limit+6)/8) }

// TakeSlot takes a slot. It returns false if none is free.
func (s *slots) TakeSlot() bool {
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

// waking is whether and how the worker's engine is woken.
type waking struct {
	may   atomic.Bool // the operator wants it
	now   atomic.Bool // it is being woken
	again atomic.Int64
}

// wakeAgain is the least time between two tries to wake an engine.
const wakeAgain = 5 * time.Second

// Wakes returns whether a request may wake the engine.
func (k *waking) Wakes() bool { return k.may.Load() }

// IsWaking returns whether the engine is being woken.
func (k *waking) IsWaking() bool { return k.now.Load() }

// BeginWake returns whether the caller is to wake the engine, and then to call EndWake: one at a time does.
func (k *waking) BeginWake(t time.Time) bool {
	return k.CanWake(t) && k.now.CompareAndSwap(false, true)
}

// CanWake returns whether the last try to wake the engine was long ago.
func (k *waking) CanWake(t time.Time) bool { return t.UnixNano() >= k.again.Load() }

// EndWake records the end of a try.
func (k *waking) EndWake(t time.Time) {
	k.again.Store(t.Add(wakeAgain).UnixNano())
	k.now.Store(false)
}

// IsFull returns whether no slot is free. An engine that sleeps has none.
func (w *Worker) IsFull() bool { return w.Asleep() || w.FreeSlots() <= 0 }

// TakeSlot takes a slot. It returns false if none is free.
func (w *Worker) TakeSlot() bool { return !w.Asleep() && w.slots.TakeSlot() }
