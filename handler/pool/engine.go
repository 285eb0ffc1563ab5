package pool

import (
	"context"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

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

// LearnModels records a worker's list of models, nil if it has none. It logs a change, and the journal
// keeps it.
func (p *Pool) LearnModels(w *worker.Worker, list *worker.ModelList, logger *zap.Logger) {
	old := w.List()
	if old != nil && list != nil && slices.Equal(old.Entries, list.Entries) {
		return
	}
	_, before := w.ModelsOf()
	w.SetList(list)
	p.findAliases()
	_, ids := w.ModelsOf()
	if (list == nil) == (old == nil) && slices.Equal(ids, before) {
		return
	}
	p.kept.journal.ModelsListed(w.ID, keptModels(list))
	if list == nil {
		return
	}
	logger.Info("worker serves models", zap.String("upstream", w.Dial), zap.Strings("models", ids))
}

// keptModels returns a list as the journal keeps it.
func keptModels(l *worker.ModelList) (models []journal.Model) {
	if l == nil {
		return nil
	}
	for _, e := range l.Entries {
		models = append(models, journal.Model{ID: e.ID, Adapter: e.Adapter})
	}
	return models
}

// recallModels takes over the list that the worker had in an earlier run, or for another router,
// until the worker answers.
func recallModels(w *worker.Worker, models []journal.Model) {
	list := new(worker.ModelList)
	for _, m := range models {
		e := worker.EntryOf(m.ID)
		e.Adapter = m.Adapter
		list.Add(e)
	}
	w.RecallList(list)
}

// Drain begins or ends the admin API's wish that the worker gets no new requests. It returns whether that
// changes anything. The worker drains on if its configuration says so.
func (p *Pool) Drain(w *worker.Worker, drains bool) (changed bool) {
	drained := w.Draining()
	changed, version := w.AskDrain(drains)
	p.kept.journal.Drained(w.ID, drains, version)
	return changed && (!drains || !drained)
}

// settleCaches does what the cache models have left to do, in steps: requests go on in between.
func (r *registry) settleCaches() {
	for r.Scheduler.Caches().Step(2048) {
		runtime.Gosched()
	}
}

// idleAfter is the time without requests after which a pool is idle. Its workers may
// sleep or cost money, so discovery asks them as rarely as silent ones.
const idleAfter = 10 * time.Minute

// IsIdle returns whether the pool had no requests for long, and none runs.
func (r *registry) IsIdle(t time.Time) bool {
	return t.Unix()-max(r.lastRequest.Load(), r.servingSince.Load()) > int64(idleAfter/time.Second) &&
		!slices.ContainsFunc(r.All(), func(w *worker.Worker) bool { n, _ := w.Running(); return n > 0 })
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
		status, _, err := p.Members.Call(ctx, w, call.Path, call.Body)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%s: status %d", call.Path, status)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
