package pool

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// wakeTimeout is how long an engine may take to wake up.
const wakeTimeout = 5 * time.Minute

// Wake wakes an engine if a request needs it: none that is awake, beside backups, can serve the request.
func (p *Pool) Wake(want *Wants, o Offers, t time.Time) {
	l := &lane{offers: o, judge: p.judgment(want, o, t)}
	p.wake(l.sleeper(t), t)
}

// sleepers returns an engine to wake for each lane that needs one.
func (q *waiters) sleepers(t time.Time) (list []*worker.Worker) {
	if q.length.Load() == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, l := range q.lanes {
		list = append(list, l.sleeper(t))
	}
	return list
}

// sleeper returns the offered worker to wake; nil if there is none, or if another is awake. It is one that is
// already being woken, or else one that was not tried just now.
func (l *lane) sleeper(t time.Time) (sleeper *worker.Worker) {
	for i := range l.offers.Ups {
		w, v := l.worker(i), l.of(i, t)
		switch {
		case !v.Possible() || w.IsBackup() || w.Health.Reach().Away():
		case v.State() != Asleep:
			return nil
		case w.IsWaking() || sleeper == nil && w.CanWake(t):
			sleeper = w
		}
	}
	return sleeper
}

// wake wakes a worker's engine, unless it is nil or being woken.
func (p *Pool) wake(w *worker.Worker, t time.Time) {
	if w == nil || !w.BeginWake(t) {
		return
	}
	p.Go(func() {
		ctx, cancel := context.WithTimeout(p.life, wakeTimeout)
		defer cancel()
		p.Logger().Info("worker is woken", zap.String("upstream", w.Dial))
		err := p.callAwake(ctx, w)
		if err == nil {
			p.awake(w)
		} else {
			p.Logger().Warn("worker cannot be woken", zap.String("upstream", w.Dial), zap.Error(err))
		}
		w.EndWake(time.Now())
		w.AskSoon()
	})
}

func (p *Pool) callAwake(ctx context.Context, w *worker.Worker) error {
	for _, call := range w.Engine().WakeCalls() {
		status, _, err := p.Call(ctx, w, call.Path, call.Body)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%s: status %d", call.Path, status)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// awake records that a worker's engine does not sleep, before it says so itself.
func (p *Pool) awake(w *worker.Worker) {
	if info := w.Engine().Info; info.Asleep {
		info.Asleep, info.Discarded = false, false
		p.SetInfo(w, info)
	}
}
