package pool

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// maxClaimed bounds how many ranks an engine can claim. Each is a target, with a stream of KV events.
const maxClaimed = 128

// declareRanks declares the worker's targets to the scheduler. Their capacity is the
// configured one, or else the one that the engine reports. The caller holds the lock, or
// nothing uses the pool yet.
func (p *Pool) declareRanks(w *Worker, set WorkerSettings) {
	e := w.Engine()
	info := &e.Info
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	size := 1
	if e.TakesRank() { // other engines choose the rank themselves
		size = max(1, cmp.Or(set.DPSize, min(info.DPSize, maxClaimed)))
	}
	for rank := range size {
		p.Scheduler.Declare(w.Target(rank), capacity)
		p.Scheduler.SetPage(w.Target(rank), int64(info.BlockSize))
	}
	before := w.SetRanks(size)
	p.retireRanks(w, size, before)
	if size != before {
		p.layout.Add(1)
	}
}

// retireRanks makes the scheduler remove targets as soon as they have no leases.
func (p *Pool) retireRanks(w *Worker, from, to int) {
	for rank := from; rank < to; rank++ {
		p.Scheduler.Retire(w.Target(rank))
	}
}

// Load returns the summed load of the worker's ranks.
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
		sum.ReportedTokens += l.ReportedTokens
		sum.Outlier = sum.Outlier || l.Outlier
		sum.Errors = max(sum.Errors, l.Errors)
		sum.PrefillRate += l.PrefillRate
		sum.RateLearned = sum.RateLearned || l.RateLearned
		sum.CapacityLearned = sum.CapacityLearned || l.CapacityLearned
	}
	return sum
}

// Drain begins or ends the admin API's wish that the worker gets no new requests. It returns whether that
// changes anything. The worker drains on if its configuration says so.
func (p *Pool) Drain(w *Worker, drains bool) (changed bool) {
	drained := w.Draining()
	changed, version := w.AskDrain(drains)
	p.kept.journal.Drained(w.ID, drains, version)
	return changed && !(drains && drained)
}

// Transfers returns whether a worker is for one part of requests.
func (p *Pool) Transfers() bool {
	return slices.ContainsFunc(p.All(), func(w *Worker) bool { return w.IsPrefill() || w.IsDecode() })
}
