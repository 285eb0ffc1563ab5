package pool

import (
	"context"
	"runtime"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"
)

const (
	// maxCaches bounds the cache models in a snapshot, in bytes. That is 4 million blocks,
	// or 64 million tokens of text. What was used longest ago is left out.
	maxCaches = 32 << 20
	// lateCaches is for what was used while the snapshot was being written.
	lateCaches = 4 << 20
)

// changes returns what shows whether the pool knows anything new, and whether requests are
// under way.
func (p *Pool) changes() (c changes, busy bool) {
	c.bookings, busy = p.Scheduler.Changes()
	c.version, c.sessions = p.Sessions.Changes(), p.Sessions.Len()
	return c, busy
}

// save writes a snapshot, if there is anything new.
func (p *Pool) save(ctx context.Context, within time.Duration) error {
	s := &p.snapshots
	s.saving.Lock()
	defer s.saving.Unlock()
	begun := time.Now()
	now, busy := p.changes()
	s.mu.Lock()
	at, last := s.place, s.last
	skip := at == nil || !s.restored || now == s.saved && !busy
	if !skip {
		s.begun = begun
	}
	s.mu.Unlock()
	if skip {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	w := snapshot.NewWriter(ctx, at, last)
	p.write(w, begun)
	head, err := w.Finish(snapshot.Head{
		Saved: begun, Secret: p.Secret, Seed: p.seed, Version: p.Sessions.Changes(), TextBlock: p.Settings.Load().TextBlock,
	})
	p.noteSaved(w, head, begun, err)
	if err == nil && !busy {
		s.mu.Lock()
		s.saved = now
		s.mu.Unlock()
	}
	return err
}

// noteSaved records how a snapshot ended.
func (p *Pool) noteSaved(w *snapshot.Writer, head *snapshot.Head, begun time.Time, err error) {
	s := &p.snapshots
	s.mu.Lock()
	s.begun = time.Time{}
	if err == nil {
		s.last = head
		s.state.Saved, s.state.Bytes, s.state.Took = begun, w.Bytes(), time.Since(begun)
	} else {
		s.state.Errors++
	}
	s.mu.Unlock()
	if err != nil {
		p.Incidents.Raise(time.Now(), incidentSnapshots, func() *zap.Logger { return p.Logger().With(zap.Error(err)) })
	}
}

// numbers are the workers' numbers in a snapshot, by id.
type numbers map[uint64]int

func (n numbers) of(t kvscore.Target) (snapshot.Target, bool) {
	number, known := n[t.Worker]
	return snapshot.Target{Worker: number, Rank: t.Rank}, known
}

// write writes all that the pool knows, in steps. Requests go on in between.
func (p *Pool) write(w *snapshot.Writer, now time.Time) {
	n := p.writeWorkers(w)
	p.writeLearned(w, n, now)
	whole := p.Sessions.Dump(func(part []affinity.Saved) bool {
		for i := range part {
			if t, known := n.of(part[i].Target); known && snapshot.Fits(part[i].EngineSession) {
				w.Binding(&part[i], t)
			}
		}
		runtime.Gosched()
		return w.Err() == nil
	})
	if !whole {
		w.Fail(affinity.ErrClosed)
	}
	for _, kept := range p.Responses.dump() {
		if t, known := n.of(kept.target); known {
			w.Response(&snapshot.Response{Hash: kept.hash, Session: kept.session}, t)
		}
	}
	p.writeCaches(w, n)
}

func (p *Pool) writeWorkers(w *snapshot.Writer) numbers {
	n := make(numbers)
	for _, one := range p.All() {
		if !snapshot.Fits(one.Dial) {
			continue
		}
		life := one.Engine().Info.Life
		if !snapshot.Fits(life) {
			life = ""
		}
		n[one.ID] = len(n)
		w.Worker(&snapshot.Worker{
			Dial: one.Dial, Life: life, Seen: time.Unix(one.seen.Load(), 0), Confirmed: one.watch.Confirmed(),
		})
	}
	return n
}

func (p *Pool) writeLearned(w *snapshot.Writer, n numbers, now time.Time) {
	learned := p.Scheduler.Learned(now)
	w.Learned(&learned)
	for i := range learned.Targets {
		if t, known := n.of(learned.Targets[i].Target); known {
			w.LearnedTarget(&learned.Targets[i], t)
		}
	}
	ratios := p.Ratios.Learned()
	for i := range ratios {
		w.Ratios(&ratios[i])
	}
}

// writeCaches writes the cache models, the most recently used chains first.
func (p *Pool) writeCaches(w *snapshot.Writer, n numbers) {
	var walk cache.Walk
	most, late := w.Bytes()+maxCaches, false
	for more := true; more && w.Err() == nil; {
		more = p.Scheduler.Caches().Read(&walk)
		for i := range walk.Chains {
			if t, known := n.of(walk.Targets[i]); known {
				w.Chain(&walk.Chains[i], t)
			}
		}
		runtime.Gosched()
		switch {
		case w.Bytes() < most:
		case late:
			return
		default:
			walk.Hurry()
			late, most = true, most+lateCaches
		}
	}
}
