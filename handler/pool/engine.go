package pool

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

const (
	// ProbeEvery is the time between two probes of a worker.
	ProbeEvery = 4 * time.Second
	// idleAfter is the time without requests after which a pool is idle. Its workers may
	// sleep or cost money, so discovery asks them as rarely as silent ones.
	idleAfter = 10 * time.Minute
)

// Watch is what package discovery keeps of a worker's engine. It lives as long as the worker.
// The pool may hold its lock when it calls the other methods.
type Watch interface {
	// AskAgain has discovery ask the worker what it is, for it may be another engine now. The
	// next probe does. It is due at once if soon is set.
	AskAgain(soon bool)
	// Restarted says that the pool has cleared the worker's cache model, because the engine has restarted.
	Restarted()
	// Close says that the pool has forgotten the worker. The pool holds no lock.
	Close()
}

// Watch returns what discovery keeps of the worker.
func (w *Worker) Watch() Watch { return w.watch }

// AskAgain makes the next probe ask the worker what it is.
func (w *Worker) AskAgain() { w.watch.AskAgain(false) }

// Engine returns what is known of the worker's engine: type, info and settings. The caller
// must not change it.
func (w *Worker) Engine() *engine.Engine { return w.engine.Load() }

// describe stores what is known of the worker's engine. Its type is the configured one, or
// else the one that it shows. changed: the worker serves other parts of requests than before.
func (w *Worker) describe(set WorkerSettings, info engine.Info) (changed bool) {
	e := engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(set.Priority), ThinkingBudget: engine.Switch(set.ThinkingBudget),
		CacheSalt: engine.Switch(set.CacheSalt), Sessions: engine.Switch(set.Sessions), DynamoInstance: set.DynamoInstanceID,
		Role: engine.Role(set.Role), MooncakePort: set.MooncakePort,
	}}
	if set.Engine != EngineAuto {
		e.Type = set.Engine
	}
	w.engine.Store(&e)
	if info.Asleep {
		w.drain.Or(drainAsleep)
	} else {
		w.drain.And(^drainAsleep)
	}
	w.findOnDemand()
	tokens, alone := e.Room()
	w.room.tokens.Store(tokens)
	w.room.alone.Store(alone)
	now := uint32(servedBy(&e))
	return w.serves.Swap(now) != now
}

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
	if w.describe(set, info) {
		p.layout.Add(1)
	}
	p.declareRanks(w, set)
	if set.MaxRunning == LimitAuto {
		w.limitSlots(set)
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
		w.describe(p.Settings.Load().Worker(w.Dial), info)
	}
	return life == "" || info.Life == life
}

// Restarted clears a worker's cache model, because its engine has restarted or is another one.
func (p *Pool) Restarted(w *Worker) { p.clear(w, clearedRestarted) }

// FellAsleep clears a worker's cache model, because its engine sleeps.
func (p *Pool) FellAsleep(w *Worker) { p.clear(w, clearedAsleep) }

// lostCache records that a target has lost its cache, as its engine's counts of cached tokens show.
// Discovery asks the engine soon whether it is another one.
func (p *Pool) lostCache(t kvscore.Target, tokens int64) {
	w := p.ByID(t.Worker)
	if w == nil {
		return
	}
	p.Go(p.settleCaches)
	w.AskAgain()
	p.countCleared(w, clearedMismatch, tokens)
}

// IsIdle returns whether the pool had no requests for long, and none runs.
func (p *Pool) IsIdle(t time.Time) bool {
	return t.Unix()-max(p.lastRequest.Load(), p.servingSince.Load()) > int64(idleAfter/time.Second) &&
		!slices.ContainsFunc(p.All(), func(w *Worker) bool { return w.slots.running.Load() > 0 })
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
