package worker

import (
	"sync/atomic"
	"time"
)

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
func (w *Worker) IsFull() bool { return w.Asleep() || w.slots.IsFull() }

// TakeSlot takes a slot. It returns false if none is free.
func (w *Worker) TakeSlot() bool { return !w.Asleep() && w.slots.TakeSlot() }
