package kvscore

import (
	"math"
	"time"
)

// unused is capacity of a target that answers without work have left unused: errors, empty
// answers, and first tokens much too soon. It stays booked until the work would have ended.
// A worker with the wrong model may answer at once. Else it would have the shortest queue, and
// get most of the requests.
type unused struct {
	prefills time.Time   // when the prefills would be over; zero if nothing is booked
	ends     []time.Time // of the requests, about in order
}

const (
	// fastest is how many times faster than its pool a worker may be. What is faster still has
	// not computed the prompt.
	fastest = 4
	// maxIdle bounds how long an answer without work stays booked, maxIdles their number on
	// a target.
	maxIdle, maxIdles = 30 * time.Second, 1024
	// paceWeight is the weight of an answer in a pace. enoughAnswers of other targets show what
	// is usual.
	paceWeight, enoughAnswers = 0.05, 4
)

// add books what the lease has not used.
func (i *unused) add(l *Lease, decoding float64) {
	last := l.booked.Add(maxIdle)
	i.prefills = earlier(later(i.prefills, l.booked).Add(duration(l.alone)), last)
	if len(i.ends) < maxIdles {
		i.ends = append(i.ends, earlier(l.booked.Add(duration(l.predicted+decoding)), last))
	}
}

// left returns what is still booked: the time of prefills in milliseconds, and requests.
func (i *unused) left(now time.Time) (wait float64, requests int) {
	for len(i.ends) > 0 && !i.ends[0].After(now) {
		i.ends = i.ends[1:]
	}
	wait = max(0, milliseconds(i.prefills.Sub(now)))
	if wait == 0 && len(i.ends) == 0 {
		i.prefills = time.Time{}
	}
	return wait, len(i.ends)
}

func duration(ms float64) time.Duration {
	return time.Duration(min(ms, milliseconds(maxIdle)) * float64(time.Millisecond))
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// pace is how much longer prefills of a target take than with priorTimes: a measure that does not
// change with what is learned. One target that answers very often may teach the scheduler its own
// times.
type pace struct {
	log float64 // natural logarithm of the factor
	n   uint64
}

// paces is what the paces of all targets add up to.
type paces struct {
	sum     float64
	targets float64 // that have one
	answers uint64
}

// paced learns the pace of a target from a prefill.
func (s *Scheduler) paced(ld *load, x features, ms float64) {
	p, all := &ld.pace, &s.paces
	if p.n == 0 {
		all.targets++
	}
	all.answers++
	p.n++
	step := (math.Log(max(ms, 1e-3)/max(x.times(&priorTimes), 1)) - p.log) * max(paceWeight, 1/float64(p.n))
	p.log += step
	all.sum += step
}

// unpaced forgets the pace of a target.
func (s *Scheduler) unpaced(ld *load) {
	if p := &ld.pace; p.n > 0 {
		s.paces.sum -= p.log
		s.paces.targets--
		s.paces.answers -= p.n
		*p = pace{}
	}
}

// tooSoon reports whether a first token came too soon for the lease's prompt to have been
// computed. shown says that the times of other targets show that: the lease then books what they would
// have taken. The lock is held.
func (s *Scheduler) tooSoon(l *Lease, now time.Time) (soon, shown bool) {
	if l.work.tokens == 0 || len(s.targets) == 1 {
		return false, false
	}
	sum, targets, answers := s.paces.sum, s.paces.targets, s.paces.answers
	if own := &l.load.pace; own.n > 0 {
		sum, targets, answers = sum-own.log, targets-1, answers-own.n
	}
	took, usual, x := milliseconds(now.Sub(l.booked)), l.alone, featuresOf(1, l.work, 0)
	if shown = answers >= enoughAnswers; shown {
		usual = x.times(&priorTimes) * math.Exp(sum/targets)
	}
	if soon = fastest*took < usual; !soon {
		return false, false
	}
	s.paced(l.load, x, took)
	if shown {
		l.alone, l.predicted = max(l.alone, usual), max(l.predicted, usual)
	}
	return true, shown
}
