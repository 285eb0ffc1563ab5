package kvscore

import "math"

const (
	// capacityStep is the change of the learned capacity after a first contradiction, as
	// a logarithm. Repeated contradictions increase the step up to maxCapacityStep.
	// Alternating ones reduce it down to minCapacityStep.
	capacityStep, minCapacityStep, maxCapacityStep = 0.05, 0.005, 0.7
	// capacityDown is the part of a step downwards: a cache model that is
	// too large does less harm than one that is too small.
	capacityDown = 0.4
	// maxCapacityChange bounds the factor between the learned and the declared capacity.
	maxCapacityChange = 16

	// fewLost is how many prompts must be missing for a lost cache. Each must have been
	// predicted with leastLost tokens at least.
	fewLost, leastLost = 3, 512
	// fewDoubted is how many losses in a row count although a small cache would explain them, too.
	fewDoubted = 2
)

// keeping is what an engine has shown of how long it keeps prompts. One whose cache is too small evicts
// what it used longest ago: all that is older than its capacity, and nothing else. One that has
// lost its cache lacks younger prompts than it had shown to keep. If prompts are missing that are only
// a little older than that, it may be either.
type keeping struct {
	proven int64  // it has kept a prompt while it used so many other tokens
	mark   uint64 // when the first missing prompt was booked; 0: none is missing
	lost   int    // missing prompts that were last used before mark
	older  int64  // the tokens that it had used since the first of them
	doubts int    // such marks since it has last kept a prompt for about as long
}

// learnCapacity compares the cached tokens that an engine reports with those in its cache
// model. An engine that reports fewer is smaller than its cache model, or has lost its cache. One that
// reports more, while its cache model is full, is larger. Fewer cached tokens of a prompt that
// was queued are ignored: prompts before it may have evicted its blocks. The lock is
// held.
func (s *Scheduler) learnCapacity(l *Lease) {
	ld := l.load
	// What KV events tell of is right about all but texts of others, which say nothing of the capacity.
	if !l.ticket.Current() || l.knowledge != Approximate || ld.slot.Knowledge() != Approximate {
		return
	}
	// Chat templates cause small differences.
	slack, used := max(ld.slot.Page(), l.counts.Prompt/4), ld.slot.Used()
	capacity := float64(ld.capacity)
	var change float64
	switch off := l.counts.Cached - l.cached; {
	case off < -slack:
		if s.maybeLost(l) || l.inFlight || l.queued {
			return
		}
		capacity = min(capacity, float64(used))
		change = -capacityDown * share(-off, l.cached)
	case off > slack && used > ld.capacity*9/10:
		capacity = max(capacity, float64(l.counts.Cached))
		change = share(off, l.counts.Cached)
	default:
		if off >= -slack/4 && l.cached >= slack {
			ld.keeping.kept(l)
		}
		return
	}
	change *= ld.capacityStep.next(change > 0)
	ld.learned = math.Log(capacity/float64(ld.declared)) - s.learned + change
	if math.Abs(ld.learned+s.learned) < math.Log(maxCapacityChange) { // at the bound, something else is wrong
		s.learned += change / (2 * math.Sqrt(float64(len(s.targets))))
	}
	s.applyCapacity(ld)
}

// kept records that the engine still had a prompt.
func (k *keeping) kept(l *Lease) {
	last := l.ticket.Last()
	if last.Used < k.mark && k.mark < l.ticket.Booked() {
		k.mark, k.lost = 0, 0 // no cache was lost
	}
	if k.proven = max(k.proven, last.Newer); last.Newer >= k.older*3/4 {
		k.doubts = 0
	}
}

// maybeLost records a missing prompt. It returns whether the cache may be lost; if not, it is too
// small. The lock is held.
func (s *Scheduler) maybeLost(l *Lease) bool {
	k, last := &l.load.keeping, l.ticket.Last()
	missing := l.cached - l.ticket.Shared() // engines may not reuse what they still compute
	if last.Lost || l.inFlight && missing < leastLost {
		return true
	}
	if k.mark == 0 || last.Used >= k.mark {
		switch full := l.load.slot.Used() > l.load.capacity/2; {
		case last.Recalled, last.Newer < k.proven*3/4:
		case full, last.Newer >= k.proven && k.doubts >= fewDoubted:
			return false
		}
		k.mark, k.lost, k.older = l.ticket.Booked(), 0, last.Newer
		if k.doubts++; k.doubts > fewDoubted {
			k.proven /= 2 // it may have another cache now
		}
	}
	if missing >= leastLost && 2*l.counts.Cached < missing && (k.proven > 0 || last.Recalled) {
		k.lost++
	}
	if k.lost == fewLost {
		l.lost = l.load.slot.Used()
		l.load.slot.Forget(k.mark) // what was computed since stays
		k.mark, k.lost = 0, 0
	}
	return true
}

// applyCapacity sets the capacity of a target's cache model from what this target and all
// targets have shown. A wrong setting is mostly wrong for all of them. The lock is held.
func (s *Scheduler) applyCapacity(ld *load) {
	bound := math.Log(maxCapacityChange)
	s.learned = min(max(s.learned, -bound), bound)
	by := min(max(s.learned+ld.learned, -bound), bound)
	if capacity := int64(float64(ld.declared) * math.Exp(by)); capacity != ld.capacity {
		ld.capacity = capacity
		ld.slot.Resize(capacity)
	}
	ld.applied = s.learned
}

// step is the size of the next change, up or down.
type step struct {
	size float64
	up   bool
}

func (s *step) next(up bool) float64 {
	switch {
	case s.size == 0:
		s.size = capacityStep
	case s.up == up:
		s.size = min(s.size*1.5, maxCapacityStep)
	default:
		s.size = max(s.size/2, minCapacityStep)
	}
	s.up = up
	return s.size
}

func share(part, all int64) float64 { return min(1, float64(part)/float64(max(1, all))) }
