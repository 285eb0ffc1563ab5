package pool

import (
	"maps"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// pairAvoided is for how long requests avoid a pair of workers after a failed transfer.
	pairAvoided = time.Minute
	// maxSilent is how many decode phases in a row must be silent for that. One may be late because
	// its worker is busy.
	maxSilent = 3
	// maxPairs bounds the pairs that are remembered.
	maxPairs = 4096
)

// PairFailed records that a transfer between two workers failed, or that its decode phase was silent. It
// returns whether requests now avoid the pair. A transfer that began before a worker's restart says nothing
// of its new engine.
func (p *Pool) PairFailed(prefill, decode *worker.Worker, silent bool, begun, t time.Time) bool {
	f := &p.pairs
	f.mu.Lock()
	defer f.mu.Unlock()
	if prefill.RestartedSince(begun) || decode.RestartedSince(begun) {
		return false
	}
	maps.DeleteFunc(f.known, func(_ [2]uint64, one pair) bool {
		return !t.Before(one.until) || len(f.known) >= maxPairs
	})
	if f.known == nil {
		f.known = make(map[[2]uint64]pair)
	}
	key := [2]uint64{prefill.ID, decode.ID}
	one := f.known[key]
	one.until, one.silent = t.Add(pairAvoided), one.silent+1
	one.avoided = !silent || one.silent >= maxSilent
	f.known[key] = one
	return one.avoided
}

// PairWorks records that a decode worker has got a prompt from a prefill worker.
func (p *Pool) PairWorks(prefill, decode *worker.Worker) {
	f := &p.pairs
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.known, [2]uint64{prefill.ID, decode.ID})
}

// Avoids returns whether requests avoid a pair of workers.
func (p *Pool) Avoids(prefill, decode *worker.Worker, t time.Time) bool {
	f := &p.pairs
	f.mu.Lock()
	defer f.mu.Unlock()
	one := f.known[[2]uint64{prefill.ID, decode.ID}]
	return one.avoided && t.Before(one.until)
}

// forget ends what was found of a worker's engine, which has restarted.
func (f *pairs) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.known, func(key [2]uint64, _ pair) bool { return key[0] == id || key[1] == id })
}

// Forecast predicts how long the prefill phase of a request would take on the best worker for it,
// without a booking. The worker is nil if there is none. full: all workers for it are full.
func (p *Pool) Forecast(want *Wants, o Offers, t time.Time, r *kvscore.Request, by kvscore.Policy, rule kvscore.SplitRule) (a kvscore.Split, w *worker.Worker, full bool) {
	c := p.Candidates(want, o, nil, t)
	defer p.Return(c)
	if len(c.Targets) == 0 {
		return a, nil, len(c.Full) > 0
	}
	scored := *r
	scored.Phase, scored.Split = kvscore.PhasePrefill, kvscore.Split{}
	a = p.Scheduler.Forecast(t, &scored, c.Targets, by, rule, &c.Sel)
	return a, c.Workers[a.Position], false
}
