package handler

import (
	"errors"

	"go.uber.org/zap"
)

// Why a worker's mirror was cleared.
const (
	clearedRefused   = "refused"   // nobody listened at its address, and it does not tell whether it is the same
	clearedRestarted = "restarted" // its engine tells of another start, or is another one
	clearedMismatch  = "mismatch"  // it reports far less cached than predicted
)

// clear takes in that a worker has lost its KV cache, on all its ranks. Sessions
// stay bound to it: it is as good as any other one for them now.
func (p *pool) clear(w *worker, why string) {
	t := now()
	held := p.load(t, w).CachedTokens
	for rank := range w.ranks() {
		p.scheduler.Clear(w.target(rank))
	}
	w.doubts.reset(t)
	if held == 0 {
		return // there was nothing to lose
	}
	theMetrics().cleared.WithLabelValues(p.name, w.dial, why).Inc()
	p.logger().Warn("worker has lost its KV cache: its mirror is cleared", zap.String("upstream", w.dial),
		zap.String("why", why), zap.Int64("tokens", held))
}

// lost takes in that nobody listens at a worker's address. The cache may be gone,
// too, or only the way to it is closed for a while: an engine that tells its life
// shows that when it is back.
func (p *pool) lost(w *worker) {
	if w.gone.CompareAndSwap(false, true) && !w.engine.recognizable() {
		p.clear(w, clearedRefused)
	}
}

// found takes in that a worker answers.
func (p *pool) found(w *worker) {
	if w.gone.Load() && w.gone.CompareAndSwap(true, false) {
		w.engine.askAgain() // it may be another one
	}
}

// saw takes in how a question of the router's own ended, and tells whether the
// worker may be asked another one.
func (p *pool) saw(w *worker, err error) bool {
	switch {
	case err == nil:
		p.found(w)
	case errors.Is(err, errNoDial):
		return false
	case refused(err):
		p.lost(w)
	default:
		w.engine.askAgain()
	}
	return err == nil
}
