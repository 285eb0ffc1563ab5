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
)

// learnCapacity compares the cached tokens that an engine reports with those in its cache
// model. An engine that reports fewer is smaller than its cache model. One that reports
// more, while its cache model is full, is larger. Fewer cached tokens of a prompt that
// was queued are ignored: prompts before it may have evicted its blocks. The lock is
// held.
func (s *Scheduler) learnCapacity(l *Lease) {
	ld := l.load
	if !l.ticket.Current() || l.knowledge != Approximate {
		return
	}
	// Chat templates cause small differences.
	slack, used := max(ld.slot.Page(), l.counts.Prompt/4), ld.slot.Used()
	capacity := float64(ld.capacity)
	var change float64
	switch off := l.counts.Cached - l.cached; {
	case off < -slack && !l.inFlight && !l.queued:
		capacity = min(capacity, float64(used))
		change = -capacityDown * share(-off, l.cached)
	case off > slack && used > ld.capacity*9/10:
		capacity = max(capacity, float64(l.counts.Cached))
		change = share(off, l.counts.Cached)
	default:
		return
	}
	change *= ld.capacityStep.next(change > 0)
	ld.learned = math.Log(capacity/float64(ld.declared)) - s.learned + change
	if math.Abs(ld.learned+s.learned) < math.Log(maxCapacityChange) { // at the bound, something else is wrong
		s.learned += change / (2 * math.Sqrt(float64(len(s.targets))))
	}
	s.applyCapacity(ld)
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
