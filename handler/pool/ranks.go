package pool

import (
	"cmp"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

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
	info := w.Engine.Last()
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

// forgetRanks removes all targets of a worker, unless one has leases. It retires them,
// too, because a request with an older table may still book on one.
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
