package pool

import (
	"context"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// upkeep is the time between two searches for leaked leases and forgotten workers.
const upkeep = 10 * time.Second

// New makes a pool and begins its upkeep. closer returns what closes the sessions that its engines keep.
func New(name string, s *Settings, closer func(*Pool) Closer) (*Pool, error) {
	p := &Pool{
		registry: &registry{
			log:       log{name, make(chan event, mostEvents)},
			Scheduler: kvscore.NewScheduler(s.schedulerSettings()), workers: make(map[string]*worker.Worker),
		},
	}
	p.life, p.endLife = context.WithCancel(context.Background())
	p.Closer = closer(p)
	var err error
	p.Sessions, err = affinity.NewBindings(affinity.Options{
		MaxSessions: s.MaxSessions,
		Journal:     &p.kept.journal,
		OnExpire:    func(key affinity.Key, b affinity.Binding, why affinity.Reason) { p.Closer.Ended(key, &b.Want, why) },
	})
	if err != nil {
		return nil, err
	}
	p.setKeys(journal.Keys{Secret: affinity.NewSecret(), Seed: rand.Uint64()}) //nolint:gosec // unknown outside is enough
	p.Scheduler.SetJournal(&p.kept.journal)
	p.Scheduler.OnLost(p.lostCache)
	p.Responses.journal = &p.kept.journal
	p.Members.workers, p.Budget.pool, p.Tenants.workers, p.Tenants.book = p.registry, p.registry, p.registry, &p.Quota
	p.Quota.Journal = &p.kept.journal
	p.Settings.Store(s)
	p.queue.workers = p.registry
	p.Scheduler.OnRoom(p.roomier)
	p.overflow = p.newOverflow()
	observe.RetryDenied(name, 0) // so that its 0 is visible
	p.declareAll(s)
	go p.maintain()
	go p.emit(p.life)
	return p, nil
}

// Destruct writes the end of the journal or closes the sessions that engines hold, ends the upkeep,
// and closes the store.
func (p *Pool) Destruct() error {
	if !p.JournalState().On {
		p.Closer.CloseAll()
	}
	p.endLife()
	p.tasks.Wait()
	for _, w := range p.All() {
		w.Past.ForgetMetrics()
	}
	p.KeepShare(Share{})
	p.KeepJournal(Journal{})
	return p.Sessions.Close()
}

// Apply replaces the pool's settings, and returns whether they changed.
func (p *Pool) Apply(s *Settings) bool {
	old := p.adopt(s)
	p.findAliases()
	p.Sessions.SetMaxSessions(s.MaxSessions)
	go p.settleCaches()
	p.queue.reviewAll()
	return !reflect.DeepEqual(old, s)
}

func (p *Pool) maintain() {
	var untracked uint64
	held := holdWatch{Pool: p, base: 1, depth: 1}
	tick, hung, review := time.Tick(upkeep), time.Tick(worker.HungCheck), time.Tick(reviewEvery)
	for {
		select {
		case <-p.life.Done():
			for p.queue.length.Load() > 0 { // requests may outlast the pool
				<-review
				p.queue.reviewAll()
			}
			return
		case t := <-review:
			p.queue.reviewAll()
			for _, w := range p.queue.sleepers(t) {
				p.wake(w, t)
			}
		case t := <-hung:
			p.checkSilence(t)
			held.check(t)
		case t := <-tick:
			if n := p.Scheduler.Expire(t); n > 0 {
				p.Logger().Warn("leases leaked, and the router ended them", zap.Int("leases", n))
			}
			if n := p.Scheduler.Stats().Untracked; n > untracked {
				untracked = n
				p.Raise(t, "no room in the cache model for some prompts")
			}
			p.noteOutliers(t)
			p.forget(t)
			p.Members.prune(t)
			p.watchJournal(t)
			p.Tenants.watch()
			p.Incidents.End(t, p.Logger())
		}
	}
}
