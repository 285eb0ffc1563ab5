package discovery

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// Watch is what discovery keeps of one worker: when it is asked, its load reports, its KV
// events, and whether they are true. It belongs to no configuration, and ends when the pool
// forgets the worker.
type Watch struct {
	pool   *pool.Pool
	worker *pool.Worker

	probing probing
	loads   loadReports
	events  subscription

	reports     reports
	eventsCheck eventsCheck
	uncounted   atomic.Int32 // see CountedCache
	Hits        hitSums

	reviewing sync.Mutex // for review
	warned    pool.Incidents
}

// NewWatch returns the watch of a worker. It is for [pool.New].
func NewWatch(p *pool.Pool, w *pool.Worker) pool.Watch { return &Watch{pool: p, worker: w} }

// Of returns the watch of a worker.
func Of(w *pool.Worker) *Watch { return w.Watch().(*Watch) }

// Apply replaces a pool's settings, and returns whether they changed.
func Apply(p *pool.Pool, s *pool.Settings) (changed bool) {
	changed = p.Apply(s)
	for _, w := range p.All() {
		Of(w).follow()
	}
	return changed
}

// probing says when a worker is probed, and when it is asked what it is and serves.
type probing struct {
	source   atomic.Uint64 // the prober that last had the worker from a dynamic source
	at       atomic.Int64  // the last probe, Unix nanoseconds
	underWay atomic.Bool
	listed   atomic.Int64 // when it was last asked which models it serves, Unix nanoseconds
	refused  atomic.Bool  // it refused that, for want of a key

	mu      sync.Mutex
	next    time.Time // when it is asked again what its engine is
	silent  int       // such questions in a row without an answer
	changed time.Time // when the start that the engine reports last changed
}

const (
	// probeEvery is the time between two probes of a worker. A probe asks for its models,
	// or at least connects to it.
	probeEvery = pool.ProbeEvery
	// askedAgain is the time between two questions to a worker about its engine.
	askedAgain = 15 * time.Second
	// askedLess is the longest such time, for a worker that does not answer.
	askedLess = 5 * time.Minute
)

// AskAgain implements pool.Watch.
func (x *Watch) AskAgain(soon bool) {
	q := &x.probing
	q.mu.Lock()
	q.next = time.Time{}
	q.mu.Unlock()
	if soon {
		q.listed.Store(0)
		q.at.Store(0)
	}
}

// claim returns whether the worker must be asked now what its engine is. The caller then asks
// it. Other callers get false meanwhile.
func (q *probing) claim(t time.Time) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.Before(q.next) {
		return false
	}
	q.next = t.Add(probeEvery)
	return true
}

// isSilent returns whether the last two such questions had no answer.
func (q *probing) isSilent() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.silent > 1
}

// answered records whether such a question had an answer. A silent worker is asked less and
// less often.
func (q *probing) answered(t time.Time, did bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if did {
		q.silent, q.next = 0, t.Add(askedAgain)
		return
	}
	q.next = t.Add(min(probeEvery<<min(q.silent, 8), askedLess))
	q.silent++
}

// modelsInterval returns the least time between two questions to the worker about its models.
func (x *Watch) modelsInterval(t time.Time) time.Duration {
	if x.pool.IsIdle(t) || x.probing.refused.Load() {
		return askedLess
	}
	return 0
}

// Restarted implements pool.Watch.
func (x *Watch) Restarted() {
	x.reports.reset()
	x.resetEvents()
}

// Close implements pool.Watch.
func (x *Watch) Close() {
	x.unfollow()
	predictionErrors.DeleteLabelValues(x.pool.Name, x.worker.Dial)
}
