package handler

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Why a worker's cache model was cleared.
const (
	clearedRefused   = "refused"   // nothing listened at its address
	clearedRestarted = "restarted" // its engine has started anew, or is another one
	clearedMismatch  = "mismatch"  // it reports far less cached than predicted
)

// clear records that a worker has lost its KV cache, on all its ranks. Sessions stay
// bound to it: any other worker is no better for them now.
func (p *pool) clear(w *worker, why string) {
	t := time.Now()
	held := p.load(t, w).CachedTokens
	for rank := range w.ranks() {
		p.scheduler.Clear(w.target(rank))
	}
	w.cacheCheck.reset(t)
	if held == 0 {
		return // there was nothing to lose
	}
	cachesCleared.WithLabelValues(p.name, w.dial, why).Inc()
	p.logger().Warn("worker has lost its KV cache: its cache model is cleared", zap.String("upstream", w.dial),
		zap.String("why", why), zap.Int64("tokens", held))
}

// missed records that no connection to a worker could be made, and marks it down. If
// the connection was refused, the engine's process has ended, and so has its KV cache.
func (p *pool) missed(w *worker, err error) {
	r := unreachable
	if refused(err) {
		r = refusing
	}
	p.away(w, r, err)
}

// away records that a worker is away, and marks it down.
func (p *pool) away(w *worker, r reach, err error) {
	before, marked := w.health.miss(time.Now(), r)
	if r == refusing && before != refusing {
		p.clear(w, clearedRefused)
	}
	if marked {
		p.logger().Warn("worker is marked down", zap.String("upstream", w.dial), zap.String("why", err.Error()))
	}
}

// unanswered records that a worker did not answer a question of the router. A worker
// that sends tokens may be too busy for that.
func (p *pool) unanswered(w *worker, err error) {
	if last := w.flow.last.Load(); last != 0 && time.Since(tickTime(last)) < probeEvery {
		return
	}
	if w.health.unanswered.Add(1) >= fewUnanswered || w.health.reach().away() {
		p.away(w, unresponsive, err)
	}
}

// connected records that a connection to a worker could be made.
func (p *pool) connected(w *worker) {
	if before := w.health.connected(time.Now()); before == refusing || before == unreachable {
		p.returned(w)
	}
}

// returned makes the next probe ask a worker that was away: it may be another engine.
func (p *pool) returned(w *worker) {
	w.engine.askAgain()
	w.asked.Store(0)
	w.probedAt.Store(0)
}

// found records that a worker answered, and removes the mark of missed and unanswered.
func (p *pool) found(w *worker) {
	if w.health.reach() == reachable && w.health.unanswered.Load() == 0 {
		return
	}
	before, well := w.health.meet()
	if before.away() {
		p.returned(w)
	}
	if well {
		p.logger().Info("worker is well again", zap.String("upstream", w.dial))
	}
}

// saw records how a request of the router's own ended. status is 0 if there was no
// answer, and saw returns whether there was one.
func (p *pool) saw(ctx context.Context, w *worker, status int, err error) bool {
	var dial reverseproxy.DialError
	switch {
	case status != 0:
		p.found(w)
	case errors.Is(err, upstream.ErrNoDial), errors.Is(ctx.Err(), context.Canceled): // the configuration has ended
	case errors.As(err, &dial), refused(err):
		p.missed(w, err)
	default:
		w.engine.askAgain()
		p.unanswered(w, err)
	}
	return status != 0
}

// refused returns whether nothing listens at the worker's address. Caddy's dial error
// hides the system's except for its text. A name server or forward proxy that refuses
// connections says nothing of the worker.
func refused(err error) bool {
	text := err.Error()
	return strings.Contains(text, syscall.ECONNREFUSED.Error()) &&
		!strings.Contains(text, "lookup ") && !strings.Contains(text, "proxyconnect ")
}
