package pool

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

const (
	// idleAfter is the time without requests after which a pool is idle. Its workers may
	// sleep or cost money, so discovery asks them as rarely as silent ones.
	idleAfter = 10 * time.Minute
)

// SetInfo records what a worker's engine reports. It returns false if the pool has replaced
// the worker.
func (p *Pool) SetInfo(w *Worker, info engine.Info) bool {
	defer p.queue.reviewAll() // after the unlock: the worker's limit may have changed
	if info.Type != w.Engine().Type {
		defer p.findAliases()
	}
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	if p.workers[w.Dial] != w {
		return false
	}
	set := p.Settings.Load().Worker(w.Dial)
	if w.Describe(set, info) {
		p.layout.Add(1)
	}
	p.declareRanks(w, set)
	if set.MaxRunning == LimitAuto {
		w.LimitSlots(set)
	}
	return true
}

// recallLife records the start that a worker's engine reported to an earlier run. It returns
// false if the engine has reported another one since.
func (p *Pool) recallLife(w *Worker, life string) bool {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	info := w.Engine().Info
	if info.Life == "" {
		info.Life = life
		w.Describe(p.Settings.Load().Worker(w.Dial), info)
	}
	return life == "" || info.Life == life
}

// Restarted clears a worker's cache model, because its engine has restarted or is another one.
func (p *Pool) Restarted(w *Worker) { p.clear(w, observe.ClearedRestarted) }

// FellAsleep clears a worker's cache model, because its engine sleeps.
func (p *Pool) FellAsleep(w *Worker) { p.clear(w, observe.ClearedAsleep) }

// lostCache records that a target has lost its cache, as its engine's counts of cached tokens show.
// Discovery asks the engine soon whether it is another one.
func (p *Pool) lostCache(t kvscore.Target, tokens int64) {
	w := p.ByID(t.Worker)
	if w == nil {
		return
	}
	p.Go(p.settleCaches)
	w.AskAgain()
	p.countCleared(w, observe.ClearedMismatch, tokens)
}

// IsIdle returns whether the pool had no requests for long, and none runs.
func (p *Pool) IsIdle(t time.Time) bool {
	return t.Unix()-max(p.lastRequest.Load(), p.servingSince.Load()) > int64(idleAfter/time.Second) &&
		!slices.ContainsFunc(p.All(), func(w *Worker) bool { n, _ := w.Running(); return n > 0 })
}

// adoptBlockSize fills in the engines' block size, if none is configured. The caller holds
// the lock.
func (p *Pool) adoptBlockSize(s *Settings) {
	if s.BlockSizeUnset && p.blockSize > 0 {
		s.BlockSize = p.blockSize
	}
}

// KnowsBlockSize returns whether the engines have reported one block size.
func (p *Pool) KnowsBlockSize() bool {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	return p.blockSize > 0
}

// AdoptBlockSize takes a block size from the engines, if none is configured. After a change
// the index does not find earlier prompts of token ids.
func (p *Pool) AdoptBlockSize(size int) {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	old := p.Settings.Load()
	if !old.BlockSizeUnset {
		return
	}
	p.blockSize = size // also if it is the default: the source of the size changes
	if old.BlockSize == size {
		return
	}
	s := *old
	p.adoptBlockSize(&s)
	p.Settings.Store(&s)
	p.Scheduler.Apply(s.schedulerSettings())
	p.Logger().Info("block size taken from the engines", zap.Int("tokens", s.BlockSize), zap.Int("before", old.BlockSize))
}
