package kvscore

import (
	"math"
	"slices"
	"time"
)

// showing is what an answer has shown of the prefill.
type showing uint8

const (
	showsNothing showing = iota
	showsEnd             // it is over
	showsToken
	showsTooSoon // a token, before the prompt can have been computed
	showsFailure // no token
	showsMistake // no token, by the client's fault
)

// answers remembers the last answers of a target. Anomalous ones are errors, empty answers, and first
// tokens much too soon: they cost the target no work. Clients cause most of them, also where the status
// does not say so. But a worker that gives far more than its peers is an outlier: it probably serves
// something else, or is broken.
type answers struct {
	recent            recent    // how many
	anomalous, errors mean      // the shares of anomalous ones, and of those without a token that are no client's mistake
	pace              mean      // logarithm of how much longer prefills take than with priorTimes
	culprits          [2]uint64 // the last sessions or prompts with anomalous answers: see add
	found             time.Time // when a choice last found its worker to be an outlier
}

// mean is a mean of values of which the last ones weigh most.
type mean struct{ v, n float64 }

func (m *mean) add(v float64) {
	m.n++
	m.v += (v - m.v) * max(1/m.n, 0.05)
}

const (
	// mostly is the least share of anomalous answers of an outlier, fewAnswers their least number. The
	// share is also more than peersTimes that of its peers, and peersMore.
	mostly, fewAnswers    = 0.5, 5
	peersTimes, peersMore = 2, 0.2
	// outlierShown is how long an outlier is shown after the last choice that found it.
	outlierShown = time.Minute
	// fastest is how many times faster than its peers a target may be. What is faster still has
	// not computed the prompt. enoughAnswers of the peers show how fast they are.
	fastest, enoughAnswers = 4, 4
	// shortest is the time of peers, in milliseconds, below which differences are noise.
	shortest = 20
)

// add adds the answer of a lease. The anomalous answers of one client or two count only once, because
// the client may repeat the request.
func (a *answers) add(l *Lease) {
	anomalous, failed := 0.0, 0.0
	if l.shown == showsFailure || l.shown == showsMistake || l.shown == showsTooSoon && l.counts.Cached <= l.cached {
		if slices.Contains(a.culprits[:], l.culprit) {
			return
		}
		a.culprits[0], a.culprits[1] = a.culprits[1], l.culprit
		if anomalous = 1; l.shown == showsFailure {
			failed = 1
		}
	}
	a.recent.add(l.booked.Add(l.first), 1)
	a.anomalous.add(anomalous)
	a.errors.add(failed)
}

// paced learns how long a work took. The measure does not change with what is learned, because one
// target that answers very often may teach the scheduler its own times.
func (a *answers) paced(x features, ms float64) {
	a.pace.add(math.Log(max(ms, 1e-3) / max(x.times(&priorTimes), 1)))
}

// workerAnswers are those of all targets of a worker.
type workerAnswers struct{ n, anomalous, recent, targets float64 }

// ofFirst adds up the answers of the worker that the first target belongs to. Its targets stand
// side by side.
func (s *Scheduler) ofFirst(now time.Time, among []TargetRef) (a workerAnswers) {
	for _, t := range among {
		if t.Worker != among[0].Worker {
			break
		}
		if ld := s.loadOf(t); ld != nil {
			a.n, a.anomalous, a.recent = a.n+ld.answers.anomalous.n, a.anomalous+ld.answers.anomalous.v, a.recent+ld.answers.recent.value(now)
		}
		a.targets++
	}
	a.anomalous /= a.targets
	return a
}

// findOutliers finds the candidates of outliers. The lock is held.
func (s *Scheduler) findOutliers(now time.Time, among []TargetRef, sel *Selection) (found bool) {
	var all workerAnswers // targets: workers
	for at := 0; at < len(among); all.targets++ {
		a := s.ofFirst(now, among[at:])
		all.anomalous, all.recent, at = all.anomalous+a.anomalous, all.recent+a.recent, at+int(a.targets)
	}
	peers := max(all.targets-1, 1)
	for at := 0; at < len(among); {
		a := s.ofFirst(now, among[at:])
		outlier := a.n >= fewAnswers && a.anomalous > max(mostly, peersTimes*(all.anomalous-a.anomalous)/peers+peersMore) && all.targets > 1
		for end := at + int(a.targets); at < end; at++ {
			if !outlier {
				continue
			}
			c := &sel.Candidates[at]
			c.Outlier, found = true, true
			c.excess = a.recent * peers / max(all.recent-a.recent, 1)
			c.PrefillTime /= c.Slowness // see assume
			if ld := s.loadOf(among[at]); ld != nil && !sel.Dry {
				ld.answers.found = now
			}
		}
	}
	return found
}

// usual returns the time that the peers of a target take for a work, in milliseconds; 0 if too few
// answers show it.
func (s *Selection) usual(own *mean, w work) float64 {
	logs, n, peers := s.paces.v-own.v, s.paces.n-own.n, s.paced
	if own.n > 0 {
		peers--
	}
	if n < enoughAnswers {
		return 0
	}
	x := featuresOf(1, w, 0)
	return x.times(&priorTimes) * math.Exp(logs/peers)
}
