package worker

import (
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// probing says when the worker is probed, and when it is asked what it is and serves.
type probing struct {
	source  atomic.Uint64 // the prober that last had the worker from a dynamic source
	listing atomic.Int32  // the status of its answer to the last question for its models

	silent atomic.Int32 // questions what its engine is, in a row, without an answer

	mu       sync.Mutex
	underWay bool
	last     time.Time // the last probe
	listed   time.Time // when it was last asked which models it serves
	next     time.Time // when it is asked again what its engine is
	starts   []string  // that engines there reported before the present one, at most keptStarts
}

const (
	// ProbeEvery is the time between two probes of a worker. A probe asks for its models,
	// or at least connects to it.
	ProbeEvery = 4 * time.Second
	// askedAgain is the time between two questions to a worker about its engine.
	askedAgain = 15 * time.Second
	// AskedLess is the longest such time, for a worker that does not answer.
	AskedLess = 5 * time.Minute
	// keptStarts is how many earlier starts are known again.
	keptStarts = 8
)

// AskAgain has the next probe ask the worker what it is, for it may be another engine now.
func (q *probing) AskAgain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.next = time.Time{}
}

// AskSoon is AskAgain, and the probe is due at once.
func (q *probing) AskSoon() {
	q.AskAgain()
	q.AskModelsAgain(time.Now(), 0)
}

// AskModelsAgain makes the next question for the worker's models due at once, unless it was asked within
// a time. It returns whether it did.
func (q *probing) AskModelsAgain(t time.Time, within time.Duration) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.Sub(q.listed) < within {
		return false
	}
	q.listed, q.last = time.Time{}, time.Time{}
	return true
}

// BeginProbe returns whether a probe is due, so long after the last one. The caller then probes, and
// calls EndProbe. Other callers get false meanwhile. ask: the worker is asked for its models.
func (q *probing) BeginProbe(t time.Time, pause, askPause time.Duration) (due, ask bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.underWay || t.Sub(q.last) < pause {
		return false, false // another handler of the pool probes it, or has just done so
	}
	q.underWay, q.last = true, t
	if ask = t.Sub(q.listed) >= askPause; ask {
		q.listed = t
	}
	return true, ask
}

// EndProbe records the end of a probe.
func (q *probing) EndProbe() {
	q.mu.Lock()
	q.underWay = false
	q.mu.Unlock()
}

// ClaimDetection returns whether the worker must be asked now what its engine is. The caller then asks
// it. Other callers get false meanwhile.
func (q *probing) ClaimDetection(t time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.Before(q.next) {
		return false
	}
	q.next = t.Add(ProbeEvery)
	return true
}

// IsSilent returns whether the last two such questions had no answer.
func (q *probing) IsSilent() bool { return q.silent.Load() > 1 }

// Detected records whether such a question had an answer. A silent worker is asked less and
// less often.
func (q *probing) Detected(t time.Time, did bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if did {
		q.silent.Store(0)
		q.next = t.Add(askedAgain)
		return
	}
	q.next = t.Add(min(ProbeEvery<<min(q.silent.Add(1)-1, 8), AskedLess))
}

// StartChanged returns whether the engine has restarted, as what it reports of its start shows.
// shared: an earlier start is back, because several engines share the address.
func (q *probing) StartChanged(before, now string) (changed, shared bool) {
	if before == "" || now == before {
		return false, false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	shared = slices.Contains(q.starts, now)
	q.starts = append(q.starts[max(0, len(q.starts)+1-keptStarts):], before)
	return true, shared
}

// OfferedBy records which prober has the worker from a dynamic source, and returns whether it had it
// before.
func (q *probing) OfferedBy(prober uint64) (before bool) {
	return q.source.Swap(prober) == prober
}

// IsOfferedBy returns whether a prober has the worker from a dynamic source.
func (q *probing) IsOfferedBy(prober uint64) bool { return q.source.Load() == prober }

// AnsweredListing records the status of the worker's answer to the question for its models.
func (q *probing) AnsweredListing(status int) { q.listing.Store(int32(status)) } //nolint:gosec // of three digits

// ListingStatus returns it, 0 without an answer.
func (q *probing) ListingStatus() int { return int(q.listing.Load()) }

// RefusesModels returns whether the worker lists its models only with a key.
func (q *probing) RefusesModels() bool {
	status := q.ListingStatus()
	return status == http.StatusUnauthorized || status == http.StatusForbidden
}

const (
	// loadPeriod is the least time between two questions to an engine about its load: a second,
	// but timers are not exact.
	loadPeriod = 900 * time.Millisecond
	// loadLacks is how long an engine may report no load before the router warns of it. A busy one
	// may answer too late for a while.
	loadLacks = 15 * time.Second
)

// loadReports are the reports of the worker's engine about its load. They are a correction, and
// nothing waits for them.
type loadReports struct {
	mu     sync.Mutex
	asking bool
	next   time.Time // when the engine may be asked again
	known  time.Time // when all ranks were last reported, or the router began to ask; zero: it does not ask
}

// ClaimLoad returns whether the engine must be asked for its load now. The caller then asks, and
// calls LoadReported. Other callers get false meanwhile. asks: the router asks this engine at all.
func (r *loadReports) ClaimLoad(t time.Time, asks bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !asks {
		r.known, r.next = time.Time{}, time.Time{}
		return false
	}
	if r.known.IsZero() {
		r.known = t
	}
	if r.asking || t.Before(r.next) {
		return false
	}
	r.asking, r.next = true, t.Add(loadPeriod)
	return true
}

// LoadReported records the end of a question, and whether all ranks were reported.
func (r *loadReports) LoadReported(t time.Time, all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asking = false; all {
		r.known = t
	}
}

// LacksLoad returns whether the router asks for the engine's load and has not got it lately.
func (r *loadReports) LacksLoad(t time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.known.IsZero() && t.Sub(r.known) > loadLacks
}
