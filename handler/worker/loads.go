package worker

import (
	"sync"
	"time"
)

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
