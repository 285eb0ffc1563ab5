package pool

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// Worker is one engine process behind one dial address.
type Worker struct {
	// each choice reads these of all workers
	Seen       atomic.Int64                    // last time that it was an upstream, Unix seconds
	Models     atomic.Pointer[ModelList]       // its own list; nil if it has none
	Configured atomic.Pointer[map[string]bool] // the operator's list; nil if there is none
	Slots      *slots
	Drain      atomic.Uint32
	Health     Health

	Dial       string
	ID         uint64
	dp         atomic.Int32 // data-parallel ranks
	Engine     engineState
	cacheCheck cacheCheck
	Progress   progress
	Prober     atomic.Uint64 // the prober that last had it from a dynamic source
	Probed     chan struct{} // closed after the first probe
	ProbedAt   atomic.Int64  // the last probe, Unix nanoseconds
	Probing    atomic.Bool   // a probe is under way
	Asked      atomic.Int64  // last asked what it serves, Unix nanoseconds
	Refusals   atomic.Int32  // times in a row that it would not say, for want of a key
	Hits       hitSums
	taints     atomic.Pointer[[]string] // configured; nil if there are none

	background atomic.Int32 // requests of the router's own that run on it

	Misses errorRing

	probedOnce sync.Once                      // closes probed
	ProbedFor  atomic.Pointer[SharedSettings] // the configuration that probed it last for the first time
}

func newWorker(set WorkerSettings) *Worker {
	w := &Worker{Dial: set.Dial, ID: set.ID, Slots: new(slots), Probed: make(chan struct{})}
	w.dp.Store(int32(set.DPSize))
	w.limitSlots(set)
	w.Seen.Store(time.Now().Unix())
	w.configure(set)
	return w
}

// DerivedID returns the default id of the worker at an address. Its 53 bits survive
// clients that read JSON numbers as floats.
func DerivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}

// configure stores the worker's settings.
func (w *Worker) configure(set WorkerSettings) {
	if set.Drain != nil && *set.Drain {
		w.Drain.Or(DrainConfigured)
	} else {
		w.Drain.And(^DrainConfigured)
	}
	w.taints.Store(nil)
	if len(set.Taints) > 0 {
		w.taints.Store(&set.Taints)
	}
	if len(set.Models) == 0 {
		w.Configured.Store(nil)
		return
	}
	models := make(map[string]bool, len(set.Models))
	for _, m := range set.Models {
		models[m] = true
	}
	w.Configured.Store(&models)
}

// Reasons why a worker drains, as bits of worker.drain.
const (
	DrainConfigured uint32 = 1 << iota
	DrainAsked             // by the admin API
)

// Draining returns whether the worker gets no new requests.
func (w *Worker) Draining() bool { return w.Drain.Load() != 0 }

// Tainted returns the taints that the operator gave to the worker.
func (w *Worker) Tainted() []string {
	if t := w.taints.Load(); t != nil {
		return *t
	}
	return nil
}

// MarkProbed records the end of a probe.
func (w *Worker) MarkProbed() { w.probedOnce.Do(func() { close(w.Probed) }) }

// WasProbed returns whether a probe of the worker has ended.
func (w *Worker) WasProbed() bool {
	select {
	case <-w.Probed:
		return true
	default:
		return false
	}
}

// Ranks returns how many data-parallel ranks the worker has. Each is a target with a KV
// cache of its own.
func (w *Worker) Ranks() int { return max(1, int(w.dp.Load())) }

// Target returns one of the worker's targets.
func (w *Worker) Target(rank int) kvscore.Target {
	return kvscore.Target{Worker: w.ID, Rank: uint32(rank)}
}

// declareRanks makes the worker's targets known with their capacity, as configured or
// else as the engine reports it. The pool's lock is held, or nothing uses the pool yet.
func (p *Pool) declareRanks(w *Worker, set WorkerSettings) {
	info := w.Engine.Info()
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	size := 1
	if e := set.describe(info); e.TakesRank() { // ranks that cannot be chosen are no targets
		size = max(1, cmp.Or(set.DPSize, info.DPSize))
	}
	before := w.Ranks()
	for rank := range size {
		p.Scheduler.Declare(w.Target(rank), capacity)
		p.Scheduler.SetPage(w.Target(rank), int64(info.BlockSize))
	}
	w.dp.Store(int32(size))
	p.retireRanks(w, size, before)
	if size != before {
		p.Layout.Add(1)
	}
}

// retireRanks removes targets from one rank on as soon as they have no leases.
func (p *Pool) retireRanks(w *Worker, from, to int) {
	for rank := from; rank < to; rank++ {
		p.Scheduler.Retire(w.Target(rank))
	}
}

// forgetRanks removes all targets of a worker, unless one has leases. It also retires
// them: a request with an older table may still book on one.
func (p *Pool) forgetRanks(w *Worker) bool {
	all := true
	for rank := range w.Ranks() {
		all = p.Scheduler.Forget(w.Target(rank)) && all
	}
	if !all {
		p.declareRanks(w, p.Settings.Load().Worker(w.Dial)) // it is needed a while longer
		return false
	}
	p.retireRanks(w, 0, w.Ranks())
	return true
}

// Load returns the load of all the worker's ranks, summed up.
func (p *Pool) Load(t time.Time, w *Worker) kvscore.Load {
	var sum kvscore.Load
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		sum.Requests += l.Requests
		sum.PrefillTokens += l.PrefillTokens
		sum.PromptBlocks += l.PromptBlocks
		sum.OutputBlocks += l.OutputBlocks
		sum.CachedTokens += l.CachedTokens
		sum.CapacityTokens += l.CapacityTokens
		sum.ToldTokens += l.ToldTokens
		sum.PrefillRate += l.PrefillRate
		sum.Timings += l.Timings
	}
	return sum
}

// slots count and bound the inference attempts at one dial address. They stay when the
// worker there gets another id.
type slots struct {
	Running atomic.Int64
	Limit   atomic.Int64 // 0 = none
}

// full returns whether no slot is free.
func (s *slots) full() bool {
	limit := s.Limit.Load()
	return limit > 0 && s.Running.Load() >= limit
}

// room returns how many slots are free.
func (s *slots) room() int64 {
	limit := s.Limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.Running.Load()
}

// Take takes a slot. It returns false if none is free.
func (s *slots) Take() bool {
	for {
		n := s.Running.Load()
		if limit := s.Limit.Load(); limit > 0 && n >= limit {
			return false
		}
		if s.Running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// FreeSlot frees a slot of the worker for the queue.
func (p *Pool) FreeSlot(w *Worker) {
	w.Slots.Running.Add(-1)
	p.Queue.freed(w)
}
