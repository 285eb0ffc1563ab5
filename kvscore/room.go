package kvscore

import (
	"cmp"
	"slices"
	"time"
)

const (
	// roomSteps are the steps of prompts that may be booked on a target which has some room. One runs, the other one
	// waits. With one step, the mean time to the first token in overloads is up to 1.6 of that without holds, and with
	// two 1.2.
	roomSteps = 2
	// DefaultStepTokens are the prompt tokens that an engine computes in one step, if it does not report
	// them. Two of them are a step of vLLM's default on large GPUs, which is more than most others'. For an engine
	// with smaller steps, more requests wait in the engine.
	DefaultStepTokens = 4096
	// minStepTokens keeps engines busy that compute little in a step. A prompt with more is long.
	minStepTokens = 1024
	// shortWait is a wait, in milliseconds, that is no reason to hold a request: an engine may compute
	// many prompts in one step.
	shortWait = 100
	// lookAgain is after how many milliseconds at least to look again at a target with an overdue prefill. The queue
	// hears of most ends at once.
	lookAgain = 10
	// unlearned is the same, if the pool has learned no times.
	unlearned = 1000
	// clearFor is for how long a target that other routers prefer has no prefill before this router
	// uses it for a tenant's surplus. It has no room for as long after this router's own long prompts.
	clearFor = 50 * time.Millisecond
)

// Room is which requests a target's engine could begin soon.
type Room uint8

// The kinds of room.
const (
	NoRoom   Room = iota // it has enough to do
	SomeRoom             // it would begin a prefill within a few steps
	Clear                // it has little prefill, and a tenant's surplus of short prompts may begin
	Empty                // it has no prefill, and one of long prompts may begin
)

// RoomForSurplus returns which room a prompt of a tenant's surplus needs that lacks so many tokens. A long one would
// take others' steps for itself.
func RoomForSurplus(tokens int64) Room {
	if tokens <= minStepTokens {
		return Clear
	}
	return Empty
}

// SetStep sets how many prompt tokens a target's engine computes in one step; 0 is unknown.
func (s *Scheduler) SetStep(t Target, tokens int64) {
	s.with(t, func(ld *load) { ld.step = max(0, tokens) })
}

// stepTokens returns how many prompt tokens the engine computes in one step, as far as that is known.
func (ld *load) stepTokens() int64 { return max(minStepTokens, cmp.Or(ld.step, DefaultStepTokens)) }

// SetDepth multiplies the steps of all targets, because engines compute more at once than they report.
func (s *Scheduler) SetDepth(times int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depth = times
}

// Prefilled returns how many prompt tokens were computed since the start, as far as first tokens show.
func (s *Scheduler) Prefilled() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.prefilled
}

// Promise adds prefill tokens to those that are promised to requests which will be booked on a target.
// Less than 0 takes them back. They only count for its room.
func (s *Scheduler) Promise(t Target, tokens int64) {
	s.with(t, func(ld *load) { ld.promised = max(0, ld.promised+tokens) })
}

// Room returns which room a target has. If it may soon have more, in is when that is predicted, 0 if it is
// not known.
func (s *Scheduler) Room(now time.Time, t Target) (room Room, in time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ld := s.targets[t]
	if ld == nil {
		return Empty, 0
	}
	s.divide()
	ld.endDue(now)
	for room < Empty {
		if over := s.crowd(now, ld, room+1); over > 0 {
			return room, time.Duration(over * float64(time.Millisecond))
		}
		room++
	}
	return Empty, 0
}

// crowd returns for how many milliseconds a target will not have some room, as predicted; 0 if it has.
// There is some room if less than roomSteps are booked, or what is booked takes less than one more step, or is
// short. It is clear with less than the least step. As long as the pool has learned no times, only what is booked
// counts, or all targets are empty: see Settings.Bounded. The load of other clients does not count, because a request
// that is held would fall behind it.
//
// Of several routers, each one has its share of these steps for its own requests. Else the router whose
// request has just ended would see the room first, and one that has none there would never get any. For a
// tenant's surplus they share out the targets, because a share of a step is less than a long prompt. They also do
// so right after a long prompt of their own. Where many come at once, all routers have some, and do not know of each
// other's yet. The lock is held.
func (s *Scheduler) crowd(now time.Time, ld *load, room Room) float64 {
	n, booked, depth := int64(s.routers.n), ld.prefill+ld.promised, max(1, s.depth)
	step := depth * ld.stepTokens()
	shared := n > 1 && room >= Clear && ld.others
	enough := int64(1)
	if room == Clear {
		enough = depth * minStepTokens
	} else if room < Clear {
		enough = roomSteps * step
		if n > 1 {
			booked = n * (booked - ld.remotePrefill)
		}
	}
	if in := clearFor - now.Sub(s.routers.lastLong); in > 0 && room == SomeRoom && ld.others {
		return milliseconds(in)
	}
	switch {
	case !shared && booked < enough, s.latency.samples < trusting && !s.settings.Bounded:
		return 0
	case shared && booked == 0:
		return max(0, milliseconds(clearFor-now.Sub(ld.awaiting.since)))
	case s.latency.samples < trusting:
		return unlearned
	}
	context, factor := ld.reads(s.settings.BlockSize), ld.speed.factor(now)
	wait := s.wait(ld, now, true, factor, context) + factor*s.latency.predict(featuresOf(0, workOf(ld.promised, 0), context))
	switch {
	case shared:
		return wait + milliseconds(clearFor)
	case room >= Clear:
		return max(lookAgain, wait)
	}
	one := factor * s.latency.predict(featuresOf(1, workOf(step, 0), context))
	return max(0, wait-max(one, shortWait))
}

// IsQuiet returns whether a request would delay no others on a target. No prefill is booked or promised
// there, and none waits in the engine. Active requests use less than half of the KV cache.
func (s *Scheduler) IsQuiet(now time.Time, t Target) bool {
	quiet := true
	s.with(t, func(ld *load) {
		ld.endDue(now)
		quiet = s.isQuiet(now, ld)
	})
	return quiet
}

func (s *Scheduler) isQuiet(now time.Time, ld *load) bool {
	return ld == nil || len(ld.awaiting.leases) == 0 && ld.promised == 0 && !ld.external.isQueued(now) &&
		2*ld.context(s.settings.BlockSize) < float64(ld.capacity)
}

// anyRoom returns whether one of the targets has the room. The lock is held.
func (s *Scheduler) anyRoom(now time.Time, among []TargetRef, room Room) bool {
	return slices.ContainsFunc(among, func(t TargetRef) bool {
		ld := s.loadOf(t)
		return ld == nil || s.crowd(now, ld, room) <= 0
	})
}

// OnRoom sets what is called when a prefill on a target is over, without the lock. Call it before all
// else.
func (s *Scheduler) OnRoom(f func(Target)) { s.onRoom = f }
