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
	return limit - s.running.Load() - s.remote(limit)
}

// remote returns how many of the slots count as taken by other routers. An eighth stays, at least one
// of several: else who writes false reports to the stream of share could stop all service.
func (s *slots) remote(limit int64) int64 { return min(s.others.Load(), limit-(limit+6)/8) }

// TakeSlot takes a slot. It returns false if none is free.
func (s *slots) TakeSlot() bool {
	for {
		n := s.running.Load()
		if limit := s.limit.Load(); limit > 0 && n+s.remote(limit) >= limit {
			return false
		}
		if s.running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// waking is how the worker's engine is woken.
type waking struct {
	now   atomic.Bool // it is being woken
	again atomic.Int64
}

// wakeAgain is the least time between two tries to wake an engine.
const wakeAgain = 5 * time.Second

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

// drains says whether the worker drains.
type drains struct {
	reasons atomic.Uint32 // see drainConfigured
	version atomic.Uint64 // counts the calls of all routers' admin APIs that began or ended a drain
}

func (d *drains) set(reason uint32, is bool) {
	if is {
		d.reasons.Or(reason)
	} else {
		d.reasons.And(^reason)
	}
}

// Reasons why a worker drains, as bits.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
	drainMoves             // by the admin API, and streams are moved away
	drainAsleep            // the engine sleeps
)

// Draining returns whether the worker gets no new requests.
func (d *drains) Draining() bool { return d.reasons.Load() != 0 }

// Drains returns who wants that the worker drains: the admin API, the configuration, or both.
func (d *drains) Drains() (asked, configured bool) {
	reasons := d.reasons.Load()
	return reasons&drainAsked != 0, reasons&drainConfigured != 0
}

// Asleep returns whether the worker drains because its engine sleeps.
func (d *drains) Asleep() bool { return d.reasons.Load()&drainAsleep != 0 }

// AskDrain begins or ends the admin API's wish that the worker drains. It returns whether the worker had
// the other one, and the number of the call.
func (d *drains) AskDrain(drains bool) (changed bool, version uint64) {
	version = d.version.Add(1)
	return d.setDrain(drains), version
}

// DrainAsked returns the admin API's wish, and the number of the call that it comes from, 0 if there was
// none.
func (d *drains) DrainAsked() (asked bool, version uint64) {
	return d.reasons.Load()&drainAsked != 0, d.version.Load()
}

// MoveStreams has the streams of a draining worker move to others, as far as they can. It returns
// whether that is new.
func (d *drains) MoveStreams() (changed bool) { return d.reasons.Or(drainMoves)&drainMoves == 0 }

// MovesStreams returns whether the streams of the worker are to move to others. An engine that sleeps holds what it
// gets until it is woken.
func (d *drains) MovesStreams() bool { return d.reasons.Load()&(drainMoves|drainAsleep) != 0 }

// FollowDrain takes over what another router's admin API was told, unless this one knows of a later
// call. If two calls come at once, the drain counts.
func (d *drains) FollowDrain(drains bool, version uint64) (changed bool) {
	own := d.version.Load()
	if version < own || version == own && !drains {
		return false
	}
	d.version.Store(version)
	return d.setDrain(drains)
}

func (d *drains) setDrain(drains bool) (changed bool) {
	if drains {
		return d.reasons.Or(drainAsked)&drainAsked == 0
	}
	return d.reasons.And(^(drainAsked|drainMoves))&drainAsked != 0
}
