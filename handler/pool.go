package handler

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/zeebo/xxh3"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// pools holds the pools by name. They survive reloads: a new configuration is
// provisioned before the old one lets go.
var pools = caddy.NewUsagePool()

const (
	// upkeep is how often leaked leases are looked for, and workers that no
	// configuration has any more.
	upkeep = 10 * time.Second
	// workerGrace is how long a worker that is no upstream any more is
	// remembered.
	workerGrace = 10 * time.Minute
)

// pool is the workers and all state about them. Requests may use it after it
// was destructed: its state stays, only its upkeep ends.
type pool struct {
	name      string
	scheduler *kvscore.Scheduler
	sessions  affinity.Store
	limit     func(maxSessions int)
	ratios    kvscore.Ratios
	seed      uint64 // of content hashes: nobody outside can choose collisions
	stop      chan struct{}
	incidents incidents

	settings atomic.Pointer[poolSettings]

	mu      sync.RWMutex
	workers map[string]*worker // by dial address

	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the configuration last provisioned
	agreed  *poolSettings
}

// worker is one engine process behind one dial address.
type worker struct {
	dial   string
	id     uint64
	target kvscore.Target
	health health
	active atomic.Int64 // attempts under way
	seen   atomic.Int64 // last time that it was an upstream, Unix seconds
}

func newPool(name string, s *poolSettings) (*pool, error) {
	sessions, err := affinity.NewRistretto(affinity.Options{MaxSessions: s.maxSessions})
	if err != nil {
		return nil, err
	}
	p := &pool{
		name:      name,
		scheduler: kvscore.NewScheduler(s.scheduler()),
		sessions:  sessions,
		limit:     func(n int) { sessions.SetLimits(n, 0) },
		seed:      rand.Uint64(), //nolint:gosec // unknown outside of the process is enough
		stop:      make(chan struct{}),
		workers:   make(map[string]*worker),
	}
	p.settings.Store(s)
	go p.maintain()
	return p, nil
}

func (s *poolSettings) scheduler() kvscore.Settings {
	return kvscore.Settings{Memory: s.memory, BlockSize: s.blockSize}
}

// Destruct ends the upkeep and closes the store.
func (p *pool) Destruct() error {
	close(p.stop)
	return p.sessions.Close()
}

// logger returns the logger for what is no single configuration's affair.
func (p *pool) logger() *zap.Logger {
	return caddy.Log().Named("http.handlers.kv_router").With(zap.String("pool", p.name))
}

// agree checks that all handlers of one configuration want the same of the
// pool. Each configuration has its own metrics registry, by which they know
// that they belong together.
func (p *pool) agree(config *prometheus.Registry, s *poolSettings) error {
	p.agreeMu.Lock()
	defer p.agreeMu.Unlock()
	if p.config == config && p.agreed != nil && !p.agreed.equal(s) {
		return &poolConflictError{p.name}
	}
	p.config, p.agreed = config, s
	return nil
}

type poolConflictError struct{ pool string }

func (e *poolConflictError) Error() string {
	return "pool " + e.pool + ": another handler that names it has other worker, index or affinity settings"
}

// apply makes the settings those of the pool and tells whether they differ.
func (p *pool) apply(s *poolSettings) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.settings.Swap(s)
	p.scheduler.Apply(s.scheduler())
	p.limit(s.maxSessions)
	for dial, w := range p.workers {
		set := s.worker(dial)
		if set.ID != w.id {
			delete(p.workers, dial) // another identity: it comes anew
			continue
		}
		p.scheduler.Declare(w.target, set.KVTokens)
	}
	return old != s && (!old.equal(s) || len(old.workers) != len(s.workers))
}

// worker returns the worker behind an address, new ones included.
func (p *pool) worker(dial string) *worker {
	p.mu.RLock()
	w := p.workers[dial]
	p.mu.RUnlock()
	if w != nil {
		return w
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if w = p.workers[dial]; w != nil {
		return w
	}
	set := p.settings.Load().worker(dial)
	w = &worker{dial: dial, id: set.ID, target: kvscore.Target{Worker: set.ID}}
	w.seen.Store(now().Unix())
	p.workers[dial] = w
	p.scheduler.Declare(w.target, set.KVTokens)
	return w
}

// all returns the workers, in no order.
func (p *pool) all() []*worker {
	p.mu.RLock()
	defer p.mu.RUnlock()
	list := make([]*worker, 0, len(p.workers))
	for _, w := range p.workers {
		list = append(list, w)
	}
	return list
}

func (p *pool) maintain() {
	ticker := time.NewTicker(upkeep)
	defer ticker.Stop()
	for {
		select {
		case <-p.stop:
			return
		case t := <-ticker.C:
			if n := p.scheduler.Expire(t); n > 0 {
				p.logger().Warn("leases had leaked and were ended", zap.Int("leases", n))
			}
			p.forget(t)
			p.incidents.settle(t, p.logger())
		}
	}
}

// forget lets go of workers that have been no upstreams for a while.
func (p *pool) forget(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for dial, w := range p.workers {
		if now.Unix()-w.seen.Load() > int64(workerGrace/time.Second) && p.scheduler.Forget(w.target) {
			delete(p.workers, dial)
		}
	}
}

// derivedID makes a worker's id of its address. It fits into 53 bits, so that
// clients that read JSON numbers as floats keep it whole.
func derivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}
