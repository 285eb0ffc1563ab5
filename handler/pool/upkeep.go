package pool

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// upkeep is the time between two searches for leaked leases and forgotten workers.
const upkeep = 10 * time.Second

// Sleep returns whether a context lasts for a while.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// New makes a pool and begins its upkeep. closer returns what closes the sessions that its engines keep.
func New(name string, s *Settings, closer func(*Pool) Closer) (*Pool, error) {
	p := &Pool{
		registry: &registry{
			Name: name, Scheduler: kvscore.NewScheduler(s.schedulerSettings()), workers: make(map[string]*worker.Worker),
			events: make(chan event, mostEvents),
		},
	}
	p.life, p.endLife = context.WithCancel(context.Background())
	p.Closer = closer(p)
	store, err := affinity.NewBindings(affinity.Options{
		MaxSessions: s.MaxSessions,
		Journal:     &p.kept.journal,
		OnExpire:    func(key affinity.Key, b affinity.Binding, why affinity.Reason) { p.Closer.Ended(key, &b.Want, why) },
	})
	if err != nil {
		return nil, err
	}
	p.Sessions = affinity.NewSessions(store)
	p.setKeys(journal.Keys{Secret: affinity.NewSecret(), Seed: rand.Uint64()}) //nolint:gosec // unknown outside is enough
	p.Scheduler.SetJournal(&p.kept.journal)
	p.Scheduler.OnLost(p.lostCache)
	p.Responses.journal = &p.kept.journal
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

// Agree adds the settings of one handler, and returns those of all handlers of its
// configuration. The metrics registry identifies the configuration.
func (p *Pool) Agree(config *prometheus.Registry, s *Settings) (*SharedSettings, error) {
	p.agreeMu.Lock()
	defer p.agreeMu.Unlock()
	if p.config != config || p.agreed == nil {
		p.config, p.agreed = config, new(SharedSettings)
		p.agreed.all.Store(s)
		return p.agreed, nil
	}
	all, err := p.agreed.all.Load().merge(s)
	if err != nil {
		return nil, fmt.Errorf("pool %s: handlers that name it contradict each other: %w", p.Name, err)
	}
	p.agreed.all.Store(all)
	return p.agreed, nil
}

// Apply replaces the pool's settings, and returns whether they changed.
func (p *Pool) Apply(s *Settings) bool {
	defer p.queue.reviewAll() // after the unlock
	defer p.findAliases()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.adoptBlockSize(s)
	old := p.Settings.Swap(s)
	for dial := range old.Upstreams {
		if w := p.workers[dial]; w != nil && !s.Upstreams[dial] {
			w.See(time.Now().Unix()) // it was an upstream until now
		}
	}
	p.overflow.Configure(s.Worker(dialOverflow))
	p.Scheduler.Apply(s.schedulerSettings())
	go p.settleCaches()
	p.Sessions.SetMaxSessions(s.MaxSessions)
	p.renumber(s)
	for dial, w := range p.workers {
		set := s.Worker(dial)
		if w.Describe(set, w.Engine().Info) {
			p.layout.Add(1)
		}
		p.declareRanks(w, set)
		if s.Others || s.Upstreams[dial] { // else requests may still wait for it with the old limit
			w.LimitSlots(set)
		}
		w.Configure(set)
	}
	p.declareAll(s)
	return !reflect.DeepEqual(old, s)
}

func (p *Pool) maintain() {
	var untracked uint64
	silent, held := hungWatch{Pool: p}, holdWatch{Pool: p, base: 1, depth: 1}
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
			silent.check(t)
			held.check(t)
		case t := <-tick:
			if n := p.Scheduler.Expire(t); n > 0 {
				p.Logger().Warn("leases leaked, and the router ended them", zap.Int("leases", n))
			}
			if n := p.Scheduler.Stats().Untracked; n > untracked {
				untracked = n
				p.Incidents.Raise(t, "no room in the cache model for some prompts", p.Logger)
			}
			p.noteOutliers(t)
			p.forget(t)
			p.pruneMembers(t)
			p.watchJournal(t)
			p.watchLimits()
			p.Incidents.End(t, p.Logger())
		}
	}
}
