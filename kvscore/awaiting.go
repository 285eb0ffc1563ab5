package kvscore

import (
	"slices"
	"time"
)

// awaiting are a target's leases whose prefill is not over.
type awaiting struct {
	leases []*Lease // in booking order
	work   work
	// since is the earliest time at which the engine can have begun the first prefill:
	// its booking, or the end of the prefill before it. Zero is unknown.
	since   time.Time
	guessed bool // since is a guess: the scheduler learns nothing from it
}

func (q *awaiting) push(l *Lease, now time.Time) {
	if len(q.leases) == 0 {
		q.since, q.guessed = now, false
	}
	q.leases = append(q.leases, l)
	q.work.add(l.work)
}

// remove takes out a lease whose prefill ended at the given time; the zero time is
// unknown. If the end was seen and not guessed, all prefills booked before it have ended
// too, because engines prefill in order.
func (q *awaiting) remove(l *Lease, at time.Time, seen bool) {
	i := slices.Index(q.leases, l)
	for _, before := range q.leases[:i] {
		before.passed = before.passed || seen
	}
	if seen || i == 0 {
		q.since, q.guessed = at, !seen
	}
	q.leases = slices.Delete(q.leases, i, i+1)
	q.work.sub(l.work)
	if len(q.leases) == 0 {
		q.work = work{} // rounding errors
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// wait predicts the milliseconds until all prefills booked on a target are over: their
// times, less the time that the first one has run. A first prefill that is overdue waits
// for memory or slots; wait assumes that it takes as long again as it is overdue.
func (s *Scheduler) wait(ld *load, now time.Time, dry bool, factor, context float64) float64 {
	q := &ld.awaiting
	if len(q.leases) == 0 {
		return 0
	}
	first := q.leases[0]
	head := factor * s.latency.predict(featuresOf(0, first.work, context))
	all := factor * s.latency.predict(featuresOf(0, q.work, context))
	ran := 0.0 // how long the first prefill has run
	switch {
	case !q.since.IsZero():
		ran = max(0, milliseconds(now.Sub(q.since)))
	case !dry: // its start is unknown
		q.since = now
	}
	if late := ran - factor*s.latency.predict(featuresOf(1, first.work, context)); late > 0 && !first.passed {
		return all - head + late
	}
	return all - min(ran, head)
}
