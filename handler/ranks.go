package handler

import (
	"cmp"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// ranks returns how many data-parallel ranks the worker has. Each is a target with a KV
// cache of its own.
func (w *worker) ranks() int { return max(1, int(w.dp.Load())) }

// target returns one of the worker's targets.
func (w *worker) target(rank int) kvscore.Target {
	return kvscore.Target{Worker: w.id, Rank: uint32(rank)}
}

// declareRanks makes the worker's targets known with their capacity, as configured or
// else as the engine reports it. The pool's lock is held, or nothing uses the pool yet.
func (p *pool) declareRanks(w *worker, set workerSettings) {
	info := w.engine.last()
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	size := 1
	if e := set.describe(info); e.TakesRank() { // ranks that cannot be chosen are no targets
		size = max(1, cmp.Or(set.DPSize, info.DPSize))
	}
	before := w.ranks()
	for rank := range size {
		p.scheduler.Declare(w.target(rank), capacity)
		p.scheduler.SetPage(w.target(rank), int64(info.BlockSize))
	}
	w.dp.Store(int32(size))
	p.retireRanks(w, size, before)
	if size != before {
		p.layout.Add(1)
	}
}

// retireRanks removes targets from one rank on as soon as they have no leases.
func (p *pool) retireRanks(w *worker, from, to int) {
	for rank := from; rank < to; rank++ {
		p.scheduler.Retire(w.target(rank))
	}
}

// forgetRanks removes all targets of a worker, unless one has leases. It retires them,
// too, because a request with an older table may still book on one.
func (p *pool) forgetRanks(w *worker) bool {
	all := true
	for rank := range w.ranks() {
		all = p.scheduler.Forget(w.target(rank)) && all
	}
	if !all {
		p.declareRanks(w, p.settings.Load().worker(w.dial)) // it is needed a while longer
		return false
	}
	p.retireRanks(w, 0, w.ranks())
	return true
}

// load returns the load of all the worker's ranks, summed up.
func (p *pool) load(t time.Time, w *worker) kvscore.Load {
	var sum kvscore.Load
	for rank := range w.ranks() {
		l, _ := p.scheduler.Load(t, w.target(rank))
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
