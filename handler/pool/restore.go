package pool

import (
	"context"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"
)

const (
	// restoreWithin bounds the time that restoring takes.
	restoreWithin = 2 * time.Minute
	// firstProbes is how long the cache models wait for the first probes of workers:
	// engines report the size of their caches.
	firstProbes = 3 * time.Second
	// oldestCaches is the greatest age of a snapshot whose cache models are right.
	oldestCaches = time.Hour
)

// restore restores the snapshot that Recall has found. What the pool has learned since its
// start counts, and not what the snapshot says.
func (p *Pool) restore(ctx context.Context) {
	s := &p.snapshots
	s.mu.Lock()
	at, head := s.place, s.recalled
	s.mu.Unlock()
	if head == nil || at == nil {
		return
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, restoreWithin)
	defer cancel()
	r := &restorer{pool: p, settings: p.Settings.Load(), begun: begun, down: max(0, begun.Sub(head.Saved))}
	r.caches = r.down <= oldestCaches && head.TextBlock == r.settings.TextBlock
	r.readAll(ctx, at, head)
	r.Age = r.down
	s.mu.Lock()
	s.state.Restored = r.Restored
	s.mu.Unlock()
	fields := []zap.Field{
		zap.Int("sessions", r.Sessions), zap.Int("expired_sessions", r.Expired), zap.Int("responses", r.Responses),
		zap.Int64("cached_tokens", r.CachedTokens), zap.Duration("age", r.down), zap.Duration("took", time.Since(begun)),
	}
	if r.err != nil {
		p.Logger().Warn("snapshot is restored in part", append(fields, zap.Int("lost_parts", r.lost), zap.Int("parts", head.Parts()), zap.Error(r.err))...)
		return
	}
	p.Logger().Info("snapshot is restored", fields...)
}

// restorer restores one snapshot.
type restorer struct {
	Restored
	pool     *Pool
	settings *Settings
	begun    time.Time
	down     time.Duration // since the snapshot
	caches   bool          // its cache models can be right
	probed   bool          // the first probes have ended
	workers  []restoredWorker
	learned  *kvscore.Learned
	ratios   []kvscore.ModelRatios
	lost     int   // parts
	err      error // the first
}

// restoredWorker is a worker of the snapshot. The zero value is one that is no upstream.
type restoredWorker struct {
	*Worker
	hasCache bool // its engine has not restarted, as far as is known, and may have its cache still
}

// readAll reads all parts. Without the first one, the others name unknown workers.
func (r *restorer) readAll(ctx context.Context, at *snapshot.Place, head *snapshot.Head) {
	for number := 1; number <= head.Parts(); number++ {
		part, err := head.ReadPart(ctx, at, number)
		if err == nil {
			r.read(ctx, part)
			err = part.Err()
		}
		if err != nil {
			if r.lost++; r.err == nil {
				r.err = err
			}
		}
		if ctx.Err() != nil || len(r.workers) == 0 {
			r.lost += head.Parts() - number
			break
		}
	}
	r.finishLearned()
}

// read restores the records of a part.
func (r *restorer) read(ctx context.Context, part *snapshot.Part) {
	var rec snapshot.Record
	for ctx.Err() == nil && part.Next(&rec) {
		switch rec.Kind {
		case snapshot.KindWorker:
			r.workers = append(r.workers, r.worker(&rec.Worker))
		case snapshot.KindLearned:
			learned := rec.Learned
			r.learned = &learned
		case snapshot.KindTarget:
			if t, ok := r.target(rec.Target); ok && r.learned != nil {
				rec.Of.Target = t
				rec.Of.Age += r.down
				r.learned.Targets = append(r.learned.Targets, rec.Of)
			}
		case snapshot.KindRatios:
			r.ratios = append(r.ratios, rec.Ratios)
		case snapshot.KindBinding:
			r.finishLearned()
			r.binding(ctx, &rec)
		case snapshot.KindResponse:
			r.response(&rec)
		case snapshot.KindChain:
			r.finishLearned()
			r.chain(ctx, rec.Target, &rec.Chain)
		}
	}
}

// worker returns the worker at an address, if it is still an upstream.
func (r *restorer) worker(saved *snapshot.Worker) restoredWorker {
	p, s := r.pool, r.settings
	if !s.Upstreams[saved.Dial] && !s.Others || !validDial(saved.Dial) {
		return restoredWorker{}
	}
	isNew := p.Known(saved.Dial) == nil
	w := p.Worker(saved.Dial)
	if w == p.overflow {
		return restoredWorker{}
	}
	if isNew && !s.Upstreams[saved.Dial] {
		w.seen.Store(saved.Seen.Unix()) // no source has named it in this run
	}
	one := restoredWorker{w, p.recallLife(w, saved.Life) && r.caches}
	if one.hasCache {
		w.watch.Recall(saved.Confirmed)
	}
	return one
}

// target returns a target of the snapshot by its present name; false if it is not known.
func (r *restorer) target(t snapshot.Target) (kvscore.Target, bool) {
	if t.Worker >= len(r.workers) || r.workers[t.Worker].Worker == nil {
		return kvscore.Target{}, false
	}
	return kvscore.Target{Worker: r.workers[t.Worker].ID, Rank: t.Rank}, true
}

// finishLearned restores what was learned, once all of it was read.
func (r *restorer) finishLearned() {
	if r.learned == nil {
		return
	}
	r.pool.Scheduler.RestoreLearned(r.begun, r.learned)
	r.pool.Ratios.Restore(r.ratios)
	r.learned, r.ratios = nil, nil
}

func (r *restorer) binding(ctx context.Context, rec *snapshot.Record) {
	t, ok := r.target(rec.Target)
	b := &rec.Binding
	if !ok {
		return
	}
	b.Target = t
	b.Idle += r.down
	held := b.Kind == affinity.EngineBacked
	if b.Idle >= b.TTL {
		r.Expired++
		if held {
			r.awaitProbes(ctx) // they show which engine it is
			r.pool.sessionEnded(b.Key, &b.Want, affinity.Expired)
		}
		return
	}
	if done, _ := r.pool.Sessions.Restore(ctx, b); done {
		r.Sessions++
	} else if held {
		r.pool.sessionEnded(b.Key, &b.Want, affinity.Replaced)
	}
}

func (r *restorer) response(rec *snapshot.Record) {
	if t, ok := r.target(rec.Target); ok && r.pool.Responses.restore(keptResponse{rec.Response.Hash, t, rec.Response.Session}) {
		r.Responses++
	}
}

func (r *restorer) chain(ctx context.Context, of snapshot.Target, c *cache.Chain) {
	t, ok := r.target(of)
	if !ok || !r.workers[of.Worker].hasCache {
		return
	}
	r.awaitProbes(ctx)
	r.CachedTokens += r.pool.Scheduler.Caches().Restore(t, c)
}

// awaitProbes waits once for the first probes of the workers, for a while.
func (r *restorer) awaitProbes(ctx context.Context) {
	if r.probed {
		return
	}
	r.probed = true
	timeout := time.After(firstProbes)
	for i := range r.workers {
		w := r.workers[i].Worker
		if w == nil || !r.settings.Upstreams[w.Dial] {
			continue
		}
		select {
		case <-w.probed:
		case <-timeout:
			return
		case <-ctx.Done():
			return
		}
	}
}
