package pool

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// pairAvoided is for how long requests avoid a pair of workers after a failed transfer.
	pairAvoided = time.Minute
	// maxPairs bounds the pairs that are remembered.
	maxPairs = 4096
)

// pairs are the pairs of a prefill and a decode worker between which a transfer has failed
// lately. Neither worker is marked down for that.
type pairs struct {
	count atomic.Int32 // of until: readable without the lock
	mu    sync.Mutex
	until map[[2]uint64]time.Time // by the workers' ids
}

// AvoidPair makes requests avoid a pair of workers for a while.
func (p *Pool) AvoidPair(prefill, decode *Worker, t time.Time) {
	f := &p.pairs
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.until, func(_ [2]uint64, until time.Time) bool {
		return !t.Before(until) || len(f.until) >= maxPairs
	})
	if f.until == nil {
		f.until = make(map[[2]uint64]time.Time)
	}
	f.until[[2]uint64{prefill.ID, decode.ID}] = t.Add(pairAvoided)
	f.count.Store(int32(len(f.until)))
}

// Avoids returns whether requests avoid a pair of workers.
func (p *Pool) Avoids(prefill, decode *Worker, t time.Time) bool {
	f := &p.pairs
	if f.count.Load() == 0 {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return t.Before(f.until[[2]uint64{prefill.ID, decode.ID}])
}

// forget ends what was found of a worker's engine, which has restarted.
func (f *pairs) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.until, func(pair [2]uint64, _ time.Time) bool { return pair[0] == id || pair[1] == id })
	f.count.Store(int32(len(f.until)))
}

// Forecast predicts how long the prefill leg of a request would take on the best worker for it,
// without a booking. The worker is nil if there is none. full: all workers for it are full.
func (p *Pool) Forecast(want *Wants, o Offers, t time.Time, r *kvscore.Request, by kvscore.Policy, rule kvscore.Legs) (a kvscore.Apart, w *Worker, full bool) {
	c := p.Candidates(want, o, nil, t)
	defer p.Return(c)
	if len(c.Targets) == 0 {
		return a, nil, len(c.Full) > 0
	}
	scored := *r
	scored.Leg, scored.Apart = kvscore.LegPrefill, kvscore.Apart{}
	a = p.Scheduler.Forecast(t, &scored, c.Targets, by, rule, &c.Sel)
	return a, c.Workers[a.Position], false
}
