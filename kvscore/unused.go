package kvscore

import "time"

// unused is capacity of a target that answers without work have left unused: errors, empty
// answers, and first tokens much too soon. It stays booked until the work would have ended.
// A worker with the wrong model may answer at once. Else it would have the shortest queue, and
// get most of the requests.
type unused struct {
	prefills time.Time   // when the prefills would be over
	ends     []time.Time // of the requests, about in order
}

const (
	// fastest is how many times faster than its pool a worker may be. What is faster still has
	// not computed the prompt.
	fastest = 4
	// maxIdle bounds how long an answer without work stays booked, maxIdles their number on
	// a target.
	maxIdle, maxIdles = 30 * time.Second, 1024
	// suddenWeight is the weight of an answer in sudden. enoughAnswers of other targets show
	// what is usual.
	suddenWeight, enoughAnswers = 0.05, 4
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
	return max(0, milliseconds(i.prefills.Sub(now))), len(i.ends)
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

// sudden is how often first tokens of a target came too soon.
type sudden struct {
	share   float64
	answers uint64
}

// tooSoon reports whether a first token came too soon for the lease's prompt to have been
// computed. shown says that this is not usual on other targets. If it is, the engines are faster
// than predicted. The lock is held.
func (s *Scheduler) tooSoon(l *Lease, now time.Time) (soon, shown bool) {
	if l.work.tokens == 0 || len(s.targets) == 1 {
		return false, false
	}
	v, of := 0.0, &l.load.sudden
	if soon = fastest*milliseconds(now.Sub(l.booked)) < l.alone; soon {
		v = 1
	}
	of.answers++
	of.share += (v - of.share) * max(suddenWeight, 1/float64(of.answers))
	if !soon {
		return false, false
	}
	answers, share, n := uint64(0), 0.0, 0.0
	for _, ld := range s.targets {
		if ld != l.load && ld.sudden.answers > 0 {
			answers += ld.sudden.answers
			share += ld.sudden.share
			n++
		}
	}
	if answers < enoughAnswers {
		return true, false
	}
	if share > n/2 {
		return false, false
	}
	return true, true
}
