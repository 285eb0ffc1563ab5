// Package pool is the workers and all that is known of them: health, capacity, queue,
// models, engines, cache checks. It survives reloads, and knows no configuration and no
// request.
package pool

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Pools holds the pools by name. They survive reloads.
var Pools = caddy.NewUsagePool()

const (
	// upkeep is the time between two searches for leaked leases and forgotten workers.
	upkeep = 10 * time.Second
	// WorkerGrace is how long a worker is remembered that is no upstream any more.
	WorkerGrace = 10 * time.Minute
)

// Pool is the workers and all state about them. Requests may still use it after
// Destruct, which ends only its upkeep.
type Pool struct {
	Name         string
	Scheduler    *kvscore.Scheduler
	Sessions     affinity.Store
	Responses    responses
	limit        func(maxSessions int)
	LastRequest  atomic.Int64 // last request, Unix seconds
	ServingSince atomic.Int64 // when a configuration began to serve last, Unix seconds
	Memory       body.Memory  // of request bodies
	Asking       atomic.Int32 // questions for token ids under way
	Ratios       kvscore.Ratios
	seed         uint64        // of content hashes: nobody outside can choose collisions
	Probers      atomic.Uint64 // that there were; numbers the next one
	stop         chan struct{}
	Incidents    Incidents
	Queue        queue
	Spending     spending

	Backgrounds backgrounds

	Settings atomic.Pointer[Settings]
	Layout   atomic.Uint64 // counts up when an address gets another worker, or a worker other ranks: see table

	scratches sync.Pool // of *Scratch

	Mu        sync.RWMutex
	Workers   map[string]*Worker // by dial address
	others    int                // of these, that the configuration does not name, as of swept
	swept     time.Time          // others were counted last
	unnamed   *Worker            // stands for those above maxOthers
	blockSize int                // of the engines, in tokens; 0 if they do not agree

	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the configuration last provisioned
	agreed  *SharedSettings
}

// New makes a pool and begins its upkeep.
func New(name string, s *Settings) (*Pool, error) {
	sessions, err := affinity.NewRistretto(affinity.Options{MaxSessions: s.MaxSessions, MaxBytes: sessionBytes(s.MaxSessions)})
	if err != nil {
		return nil, err
	}
	p := &Pool{
		Name:      name,
		Scheduler: kvscore.NewScheduler(s.schedulerSettings()),
		Sessions:  sessions,
		limit:     func(n int) { sessions.SetLimits(n, sessionBytes(n)) },
		seed:      rand.Uint64(), //nolint:gosec // unknown outside of the process is enough
		stop:      make(chan struct{}),
		Workers:   make(map[string]*Worker),
	}
	p.Responses.seed = p.seed
	p.Settings.Store(s)
	p.Queue.pool = p
	p.unnamed = p.nameless()
	retriesDenied.WithLabelValues(name) // so that its 0 is visible
	p.declareAll(s)
	go p.maintain()
	return p, nil
}

// sessionBytes returns the memory for n sessions with keys of usual length.
func sessionBytes(n int) int64 { return max(int64(n)*384, 1<<20) }

func (s *Settings) schedulerSettings() kvscore.Settings {
	return kvscore.Settings{Memory: s.Memory, BlockSize: s.BlockSize}
}

// Destruct ends the upkeep and closes the store.
func (p *Pool) Destruct() error {
	close(p.stop)
	return p.Sessions.Close()
}

// Logger returns the logger of the pool, which no configuration owns.
func (p *Pool) Logger() *zap.Logger {
	return caddy.Log().Named("http.handlers.kv_router").With(zap.String("pool", p.Name))
}

// Agree adds the settings of one more handler, and returns those of all handlers of its
// configuration. The metrics registry identifies the configuration.
func (p *Pool) Agree(config *prometheus.Registry, s *Settings) (*SharedSettings, error) {
	p.agreeMu.Lock()
	defer p.agreeMu.Unlock()
	if p.config != config || p.agreed == nil {
		p.config, p.agreed = config, &SharedSettings{All: s}
		return p.agreed, nil
	}
	if err := p.agreed.add(s); err != nil {
		return nil, fmt.Errorf("pool %s: handlers that name it contradict each other: %w", p.Name, err)
	}
	return p.agreed, nil
}

// Apply makes the settings those of the pool, and returns whether they differ.
func (p *Pool) Apply(s *Settings) bool {
	defer func() { // without the lock
		p.Queue.reviewAll()
		for _, w := range p.All() {
			p.warnOfEngine(w)
		}
	}()
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.adoptBlockSize(s)
	old := p.Settings.Swap(s)
	for dial := range old.Upstreams {
		if w := p.Workers[dial]; w != nil && !s.Upstreams[dial] {
			w.Seen.Store(time.Now().Unix()) // it was an upstream until now
		}
	}
	p.unnamed.configure(s.Worker(dialOthers))
	p.Scheduler.Apply(s.schedulerSettings())
	go func() { // in steps, between which requests go on
		for p.Scheduler.Step(2048) {
			runtime.Gosched()
		}
	}()
	p.limit(s.MaxSessions)
	p.renumber(s)
	for dial, w := range p.Workers {
		set := s.Worker(dial)
		p.declareRanks(w, set)
		if s.Others || s.Upstreams[dial] { // else requests may still wait for it with the old limit
			w.limitSlots(set)
		}
		w.configure(set)
	}
	p.declareAll(s)
	return !reflect.DeepEqual(old, s)
}

func (p *Pool) maintain() {
	var untracked uint64
	ticker, often := time.NewTicker(upkeep), time.NewTicker(hungCheck)
	defer ticker.Stop()
	defer often.Stop()
	for {
		select {
		case <-p.stop:
			return
		case t := <-often.C:
			p.findHung(t)
		case t := <-ticker.C:
			if n := p.Scheduler.Expire(t); n > 0 {
				p.Logger().Warn("leases had leaked and were ended", zap.Int("leases", n))
			}
			if n := p.Scheduler.Stats().Untracked; n > untracked {
				untracked = n
				p.Incidents.Raise(t, "no room in the cache model for some prompts", p.Logger)
			}
			p.forget(t)
			if p.Memory.Upkeep(t) > 0 {
				p.Incidents.Raise(t, "slow uploads ended", p.Logger)
			}
			p.Incidents.closeOver(t, p.Logger())
		}
	}
}
