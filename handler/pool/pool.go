// Package pool is the workers: health, capacity, queue, models, seats. It survives
// reloads, and knows no configuration and no request. What is found out of the workers'
// engines is in package discovery.
package pool

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Pools are the pools by name. They survive reloads.
var Pools = caddy.NewUsagePool()

const (
	// upkeep is the time between two searches for leaked leases and forgotten workers.
	upkeep = 10 * time.Second
	// WorkerGrace is how long the pool remembers a worker that is no longer an upstream.
	WorkerGrace = 10 * time.Minute
)

// Pool is the workers and all state about them. Requests may still use it after
// Destruct, which ends only its upkeep.
type Pool struct {
	Name      string
	Settings  atomic.Pointer[Settings]
	Scheduler *kvscore.Scheduler
	members
	prompts
	aliases aliases
	configs
	joined joined
	conversations

	Sessions  *affinity.Sessions
	Closer    Closer
	queue     queue
	Spending  spending
	Aborts    Aborts
	Memory    body.Memory // of request bodies
	Incidents observe.Incidents
	pairs     pairs
	past      observe.Choices
	kept      kept
	shared    shared

	choices sync.Pool // of *Candidates
	life    context.Context
	endLife context.CancelFunc
	tasks   sync.WaitGroup // see Go
}

// members are the workers of a pool.
type members struct {
	lastRequest atomic.Int64  // Unix seconds; Worker.Seen is compared with it
	layout      atomic.Uint64 // grows when a table becomes invalid: a worker, or its ranks, changed

	mu        sync.RWMutex
	workers   map[string]*Worker // by dial address
	swept     time.Time          // when idle workers were last dropped for want of room
	overflow  *Worker            // stands for the workers above maxOverflow
	blockSize int                // of the engines, in tokens; 0 if they do not agree
}

// prompts says how prompts become blocks and tokens.
type prompts struct {
	Ratios kvscore.Ratios
	Asking atomic.Int32 // questions for token ids under way
}

// conversations says which conversation a request belongs to.
type conversations struct {
	keys      atomic.Pointer[journal.Keys] // of all hashes: nobody outside can choose collisions
	Responses responses
}

// configs are the configurations that use a pool.
type configs struct {
	servingSince atomic.Int64 // when the last one began to serve, Unix seconds

	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the one last provisioned
	agreed  *SharedSettings      // of its handlers
}

// New makes a pool and begins its upkeep. closer returns what closes the sessions that its engines keep.
func New(name string, s *Settings, closer func(*Pool) Closer) (*Pool, error) {
	p := &Pool{
		Name:      name,
		Scheduler: kvscore.NewScheduler(s.schedulerSettings()),
		members:   members{workers: make(map[string]*Worker)},
	}
	p.life, p.endLife = context.WithCancel(context.Background())
	p.Closer = closer(p)
	store, err := affinity.NewRistretto(affinity.Options{
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
	p.Settings.Store(s)
	p.queue.pool = p
	p.overflow = p.newOverflow()
	observe.RetryDenied(name, 0) // so that its 0 is visible
	p.declareAll(s)
	go p.maintain()
	return p, nil
}

func (s *Settings) schedulerSettings() kvscore.Settings {
	return kvscore.Settings{Memory: s.Memory, BlockSize: s.BlockSize}
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
		w.Past.ForgetFigures()
	}
	p.KeepShare(Share{})
	p.KeepJournal(Journal{})
	return p.Sessions.Close()
}

// Life ends when the pool ends.
func (p *Pool) Life() context.Context { return p.life }

// Go runs a task that ends with the pool, unless the pool has ended. Destruct waits for it.
func (p *Pool) Go(task func()) {
	if p.life.Err() == nil {
		p.tasks.Go(task)
	}
}

// logs names the logs of all pools, so that operators can direct them with the handler's.
type logs struct{}

// CaddyModule implements caddy.Module.
func (logs) CaddyModule() caddy.ModuleInfo { return caddy.ModuleInfo{ID: "http.handlers.kv_router"} }

// Logger returns the logger of the pool. No configuration owns a pool, so it writes to the logs of
// the one that serves.
func (p *Pool) Logger() *zap.Logger {
	log, serving := caddy.Log().Named(string(logs{}.CaddyModule().ID)), caddy.ActiveContext()
	if serving.GetMetricsRegistry() != nil {
		log = serving.Logger(logs{})
	}
	return log.With(zap.String("pool", p.Name))
}

// Serve records that a configuration begins to serve.
func (p *Pool) Serve(t time.Time) { p.servingSince.Store(t.Unix()) }

// Agree adds the settings of one handler, and returns those of all handlers of its
// configuration. The metrics registry identifies the configuration.
func (p *Pool) Agree(config *prometheus.Registry, s *Settings) (*SharedSettings, error) {
	p.agreeMu.Lock()
	defer p.agreeMu.Unlock()
	if p.config != config || p.agreed == nil {
		p.config, p.agreed = config, &SharedSettings{All: s}
		return p.agreed, nil
	}
	a := p.agreed
	a.mu.Lock()
	defer a.mu.Unlock()
	all, err := a.All.merge(s)
	if err != nil {
		return nil, fmt.Errorf("pool %s: handlers that name it contradict each other: %w", p.Name, err)
	}
	a.All = all
	return a, nil
}

// Apply replaces the pool's settings, and returns whether they changed.
func (p *Pool) Apply(s *Settings) bool {
	defer p.queue.reviewAll() // after the unlock
	defer p.findAliases()
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
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

// settleCaches does what the cache models have left to do, in steps: requests go on in between.
func (p *Pool) settleCaches() {
	for p.Scheduler.Caches().Step(2048) {
		runtime.Gosched()
	}
}

func (p *Pool) maintain() {
	var untracked uint64
	silent := hungWatch{Pool: p}
	ticker, hung, review := time.NewTicker(upkeep), time.NewTicker(worker.HungCheck), time.NewTicker(reviewEvery)
	defer ticker.Stop()
	defer hung.Stop()
	defer review.Stop()
	for {
		select {
		case <-p.life.Done():
			for p.queue.length.Load() > 0 { // requests may outlast the pool
				<-review.C
				p.queue.reviewAll()
			}
			return
		case <-review.C:
			p.queue.reviewAll()
		case t := <-hung.C:
			silent.check(t)
		case t := <-ticker.C:
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
			p.Incidents.End(t, p.Logger())
		}
	}
}
