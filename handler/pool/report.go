package pool

import (
	"context"
	"errors"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// Report records the outcome of an attempt on a worker.
func (p *Pool) Report(w *worker.Worker, o worker.Outcome) {
	t := time.Now()
	p.apply(t, w, w.Record(t, &o))
}

// RecordOwnRequest records how a request of the router's own ended, and returns whether
// the worker answered. status is 0 if it did not.
func (p *Pool) RecordOwnRequest(ctx context.Context, w *worker.Worker, status int, err error) bool {
	if status != 0 || !errors.Is(ctx.Err(), context.Canceled) { // else the configuration has ended
		t := time.Now()
		p.apply(t, w, w.RecordOwn(t, status, err))
	}
	return status != 0
}

// apply does what follows from a verdict on a worker. If nothing listens at its address, the engine's process has
// ended, and its KV cache with it.
func (p *Pool) apply(t time.Time, w *worker.Worker, v worker.Verdict) {
	if v == (worker.Verdict{}) {
		return
	}
	log := p.Logger().With(zap.String("upstream", w.Dial))
	if v.Ended {
		p.awake(w)
		p.ClearCache(w, observe.ClearedRefused)
	}
	if v.Well {
		log.Info("worker is healthy again")
	}
	switch {
	case v.Limited:
		p.Raise(t, "the router's own system has no room for a connection", errors.New(v.Why))
	case v.Down:
		w.Past.MarkedDown(v.Why)
		log.Warn("worker is marked down", zap.String("why", v.Why))
	case v.Hung:
		log.Warn("worker is hung, and marked down until it makes progress", zap.Duration("silent", v.For), zap.Int("streams", v.Streams))
	case v.Progresses:
		log.Info("worker makes progress again", zap.Duration("hung", v.For))
	}
}

// SetInfo records what a worker's engine reports. It returns false if the pool has replaced
// the worker.
func (p *Pool) SetInfo(w *worker.Worker, info engine.Info) bool {
	other := info.Type != w.Engine().Type
	known := p.describe(w, info)
	if other {
		p.findAliases()
	}
	p.queue.reviewAll() // the worker's limit may have changed
	return known
}

func (r *registry) describe(w *worker.Worker, info engine.Info) (known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers[w.Dial] != w {
		return false
	}
	if w.Learn(info) {
		r.layout.Add(1)
	}
	r.declareRanks(w)
	if w.Settings().MaxRunning == worker.LimitAuto {
		w.LimitSlots(worker.LimitAuto)
	}
	return true
}

// recallBootID records the start that a worker's engine reported to an earlier run. It returns
// false if the engine has reported another one since.
func (r *registry) recallBootID(w *worker.Worker, bootID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	info := w.Engine().Info
	if info.BootID == "" {
		info.BootID = bootID
		w.Learn(info)
	}
	return bootID == "" || info.BootID == bootID
}

// awake records that a worker's engine does not sleep, before it says so itself.
func (p *Pool) awake(w *worker.Worker) {
	if info := w.Engine().Info; info.Asleep {
		info.Asleep, info.Discarded = false, false
		p.SetInfo(w, info)
	}
}

// ClearCache clears the cache models of all ranks of a worker that has lost its KV cache.
// Sessions stay bound to the worker: no other worker is better for them.
func (p *Pool) ClearCache(w *worker.Worker, why string) {
	t := time.Now()
	cached := p.Load(t, w).CachedTokens
	for rank := range w.Ranks() {
		p.Scheduler.Clear(w.Target(rank))
	}
	p.kept.journal.LostCache(w.ID)
	if why != observe.ClearedReset {
		w.Restarted()
		p.Pairs.forget(w.ID)
	}
	if why == observe.ClearedRefused || why == observe.ClearedRestarted {
		w.EndHung() // the process that hung has ended
	}
	if cached > 0 { // else there was nothing to lose
		p.countCleared(w, why, cached)
	}
}

// countCleared counts that a worker has lost its KV cache, of some tokens.
func (r *registry) countCleared(w *worker.Worker, why string, cached int64) {
	w.Past.Cleared(why)
	r.Logger().Warn("worker lost its KV cache, and the router cleared its cache model", zap.String("upstream", w.Dial),
		zap.String("why", why), zap.Int64("tokens", cached))
}

// noteOutliers raises a condition while errors set a worker apart from its peers.
func (r *registry) noteOutliers(t time.Time) {
	for _, w := range r.All() {
		if load := r.Load(t, w); load.ErrorsApart() {
			r.Raise(t, "a worker answers with errors or nothing, unlike the others", w.Past.LastFailure())
		}
	}
}
