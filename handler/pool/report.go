package pool

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"time"

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
func (p *Pool) clear(w *Worker, why string) {
	t := time.Now()
	held := p.Load(t, w).CachedTokens
	for rank := range w.Ranks() {
		p.Scheduler.Clear(w.Target(rank))
	}
	w.cacheCheck.reset(t)
	if held == 0 {
		return // there was nothing to lose
	}
	cachesCleared.WithLabelValues(p.Name, w.Dial, why).Inc()
	p.Logger().Warn("worker has lost its KV cache: its cache model is cleared", zap.String("upstream", w.Dial),
		zap.String("why", why), zap.Int64("tokens", held))
}

// Unreached records that no connection to a worker could be made, and marks it down. A
// refused connection means that the engine's process, and its KV cache, has ended.
func (p *Pool) Unreached(w *Worker, err error) {
	r := unreachable
	if Refused(err) {
		r = refusing
	}
	p.away(w, r, err)
}

// away records that a worker is away, and marks it down.
func (p *Pool) away(w *Worker, r reach, err error) {
	before, marked := w.Health.miss(time.Now(), r)
	if r == refusing && before != refusing {
		p.clear(w, clearedRefused)
	}
	if marked {
		p.Logger().Warn("worker is marked down", zap.String("upstream", w.Dial), zap.String("why", err.Error()))
	}
}

// unanswered records that a worker did not answer a question of the router. A worker
// that sends tokens may be too busy for that.
func (p *Pool) unanswered(w *Worker, err error) {
	if last := w.Progress.LastOutput.Load(); last != 0 && time.Since(tickTime(last)) < ProbeEvery {
		return
	}
	if w.Health.unanswered.Add(1) >= fewUnanswered || w.Health.Reach().Away() {
		p.away(w, Unresponsive, err)
	}
}

// Connected records that a connection to a worker could be made.
func (p *Pool) Connected(w *Worker) {
	if before := w.Health.connected(time.Now()); before == refusing || before == unreachable {
		p.returned(w)
	}
}

// returned makes the next probe ask a worker that was away: it may be another engine.
func (p *Pool) returned(w *Worker) {
	w.Engine.AskAgain()
	w.Asked.Store(0)
	w.ProbedAt.Store(0)
}

// Answered records that a worker answered, and removes the mark that its absence set.
func (p *Pool) Answered(w *Worker) {
	if w.Health.Reach() == reachable && w.Health.unanswered.Load() == 0 {
		return
	}
	before, well := w.Health.meet()
	if before.Away() {
		p.returned(w)
	}
	if well {
		p.Logger().Info("worker is well again", zap.String("upstream", w.Dial))
	}
}

// RecordOwnRequest records how a request of the router ended. status is 0 if there was no
// answer. It returns whether there was one.
func (p *Pool) RecordOwnRequest(ctx context.Context, w *Worker, status int, err error) bool {
	var dial reverseproxy.DialError
	switch {
	case status != 0:
		p.Answered(w)
	case errors.Is(ctx.Err(), context.Canceled): // the configuration has ended
	case errors.As(err, &dial), Refused(err):
		p.Unreached(w, err)
	default:
		w.Engine.AskAgain()
		p.unanswered(w, err)
	}
	return status != 0
}

// Refused returns whether nothing listens at the worker's address. Caddy's dial error
// hides the system's except for its text. A name server or forward proxy that refuses
// connections says nothing of the worker.
func Refused(err error) bool {
	text := err.Error()
	return strings.Contains(text, syscall.ECONNREFUSED.Error()) &&
		!strings.Contains(text, "lookup ") && !strings.Contains(text, "proxyconnect ")
}
