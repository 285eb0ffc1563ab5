package pool

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// idleAfter is the time without requests after which a pool is idle. Its workers may
// sleep or cost money, so discovery asks them as rarely as silent ones.
const idleAfter = 10 * time.Minute

// IsIdle returns whether the pool had no requests for long, and none runs.
func (r *registry) IsIdle(t time.Time) bool {
	return t.Unix()-max(r.lastRequest.Load(), r.servingSince.Load()) > int64(idleAfter/time.Second) &&
		!slices.ContainsFunc(r.All(), func(w *worker.Worker) bool { n, _ := w.Running(); return n > 0 })
}

// adoptBlockSize fills in the engines' block size, if none is configured. The caller holds
// the lock.
func (r *registry) adoptBlockSize(s *Settings) {
	if s.BlockSizeUnset && r.blockSize > 0 {
		s.BlockSize = r.blockSize
	}
}

// KnowsBlockSize returns whether the engines have reported one block size.
func (r *registry) KnowsBlockSize() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.blockSize > 0
}

// AdoptBlockSize takes a block size from the engines, if none is configured. After a change
// the index does not find earlier prompts of token ids.
func (r *registry) AdoptBlockSize(size int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.Settings.Load()
	if !old.BlockSizeUnset {
		return
	}
	r.blockSize = size // also if it is the default: the source of the size changes
	if old.BlockSize == size {
		return
	}
	s := *old
	r.adoptBlockSize(&s)
	r.Settings.Store(&s)
	r.Scheduler.Apply(s.schedulerSettings())
	r.Logger().Info("block size taken from the engines", zap.Int("tokens", s.BlockSize), zap.Int("before", old.BlockSize))
}
