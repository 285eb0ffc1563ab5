package kvscore

import (
	"math"
	"slices"
	"time"
)

// Learned is what a scheduler has learned of the engines and of the traffic, apart from the
// cache models.
type Learned struct {
	// Latency has the coefficients of prefill times, and the sums that the next samples
	// add to, by row.
	Latency  [nFeatures]float64
	Squares  [nFeatures * nFeatures]float64
	Products [nFeatures]float64
	Samples  uint64

	// Prefill and Answer are mean numbers of tokens. Booked and Answers are the
	// numbers of requests that they are means of.
	Prefill, Answer float64
	Booked, Answers uint64

	// Capacity is the logarithm of the mean factor between learned and declared capacity.
	Capacity float64
	Targets  []LearnedTarget
}

// LearnedTarget is what a scheduler has learned of one target.
type LearnedTarget struct {
	Target Target
	// Declared is the capacity to which Capacity applies, in tokens. Capacity is the
	// logarithm of a factor beside that of all targets.
	Declared int64
	Capacity float64
	// Slowness is the logarithm of the target's factor, of the given age.
	Slowness float64
	Age      time.Duration
	Samples  uint64
}

// Learned returns what the scheduler has learned.
func (s *Scheduler) Learned(now time.Time) Learned {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, t := s.latency, &s.traffic
	l := Learned{
		Latency: e.t, Squares: e.a, Products: e.b, Samples: e.samples,
		Prefill: t.prefill, Answer: t.answer, Booked: t.bookings, Answers: t.answers,
		Capacity: s.learned,
	}
	for _, ld := range s.targets {
		one := LearnedTarget{Target: ld.target, Declared: ld.declared, Capacity: ld.learned, Slowness: ld.speed.log, Samples: ld.speed.samples}
		if one.Samples > 0 {
			one.Age = max(0, now.Sub(ld.speed.at))
		}
		l.Targets = append(l.Targets, one)
	}
	return l
}

// RestoreLearned takes over what another scheduler has learned, where this one has learned
// less. It ignores values that cannot be right.
func (s *Scheduler) RestoreLearned(now time.Time, l *Learned) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.Samples > s.latency.samples && sane(l.Latency[:], 0, 1e9) && sane(l.Squares[:], 0, 1e15) && sane(l.Products[:], 0, 1e15) {
		s.latency = &estimator{t: l.Latency, a: l.Squares, b: l.Products, samples: l.Samples}
	}
	if l.Booked > s.traffic.bookings && sane([]float64{l.Prefill, l.Answer}, 0, 1e9) {
		s.traffic = traffic{prefill: l.Prefill, answer: l.Answer, bookings: l.Booked, answers: l.Answers}
	}
	if bound := math.Log(maxCapacityChange); s.learned == 0 && sane([]float64{l.Capacity}, -bound, bound) {
		s.learned = l.Capacity
		for _, ld := range s.targets { // no change so far
			ld.learned, ld.applied = ld.learned-s.learned, s.learned
		}
	}
	s.restored = make(map[Target]*LearnedTarget)
	for i := range l.Targets {
		one := &l.Targets[i]
		if !sane([]float64{one.Capacity}, -2*math.Log(maxCapacityChange), 2*math.Log(maxCapacityChange)) ||
			!sane([]float64{one.Slowness}, math.Log(minFactor), math.Log(maxFactor)) {
			continue
		}
		s.restored[one.Target] = one
		if ld := s.targets[one.Target]; ld != nil {
			if ld.speed.samples == 0 && one.Samples > 0 {
				ld.speed = speed{log: one.Slowness, samples: one.Samples, at: now.Add(-max(0, one.Age))}
			}
			s.restoreCapacity(ld)
		}
	}
}

// restoreCapacity applies a restored capacity once the target has the same declared one:
// engines are asked for it after the start. The lock is held.
func (s *Scheduler) restoreCapacity(ld *load) {
	one := s.restored[ld.target]
	if one == nil || one.Declared != ld.declared || ld.capacityStep != (step{}) {
		return
	}
	delete(s.restored, ld.target)
	ld.learned = one.Capacity
	s.applyCapacity(ld)
}

func sane(values []float64, least, most float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return !(v >= least && v <= most) })
}
