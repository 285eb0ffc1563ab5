package handler

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
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
	// upkeep is the time between two searches for leaked leases and forgotten workers.
	upkeep = 10 * time.Second
	// workerGrace is how long a worker is remembered that is no upstream any more.
	workerGrace = 10 * time.Minute
)

// pool is the workers and all state about them. Requests may still use it after
// Destruct, which ends only its upkeep.
type pool struct {
	name      string
	scheduler *kvscore.Scheduler
	sessions  affinity.Store
	responses responses
	limit     func(maxSessions int)
	used      atomic.Int64 // last request, Unix seconds
	live      atomic.Int64 // when a configuration began to serve last, Unix seconds
	memory    body.Memory  // of request bodies
	asking    atomic.Int32 // questions for token ids under way
	ratios    kvscore.Ratios
	seed      uint64        // of content hashes: nobody outside can choose collisions
	probers   atomic.Uint64 // that there were; numbers the next one
	stop      chan struct{}
	incidents incidents
	queue     queue
	spending  spending

	backgrounds backgrounds

	settings atomic.Pointer[poolSettings]
	layout   atomic.Uint64 // counts up when an address gets another worker, or a worker other ranks: see table

	scratches sync.Pool // of *scratch

	mu        sync.RWMutex
	workers   map[string]*worker // by dial address
	others    int                // of these, that the configuration does not name, as of swept
	swept     time.Time          // others were counted last
	unnamed   *worker            // stands for those above maxOthers
	blockSize int                // of the engines, in tokens; 0 if they do not agree

	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the configuration last provisioned
	agreed  *sharedSettings
}

// worker is one engine process behind one dial address.
type worker struct {
	// each choice reads these of all workers
	seen       atomic.Int64                    // last time that it was an upstream, Unix seconds
	models     atomic.Pointer[modelList]       // its own list; nil if it has none
	configured atomic.Pointer[map[string]bool] // the operator's list; nil if there is none
	slots      *slots
	drain      atomic.Uint32
	health     health

	dial       string
	id         uint64
	dp         atomic.Int32 // data-parallel ranks
	engine     engineState
	cacheCheck cacheCheck
	flow       flow
	by         atomic.Uint64 // the prober that last had it from a dynamic source
	probed     chan struct{} // closed after the first probe
	probedAt   atomic.Int64  // the last probe, Unix nanoseconds
	probing    atomic.Bool   // a probe is under way
	asked      atomic.Int64  // last asked what it serves, Unix nanoseconds
	refusals   atomic.Int32  // times in a row that it would not say, for want of a key
	hits       hits
	taints     atomic.Pointer[[]string] // configured; nil if there are none

	background atomic.Int32 // requests of the router's own that run on it

	misses misses

	probedOnce sync.Once                      // closes probed
	probedFor  atomic.Pointer[sharedSettings] // the configuration that probed it last for the first time
}

func newPool(name string, s *poolSettings) (*pool, error) {
	sessions, err := affinity.NewRistretto(affinity.Options{MaxSessions: s.maxSessions, MaxBytes: sessionBytes(s.maxSessions)})
	if err != nil {
		return nil, err
	}
	p := &pool{
		name:      name,
		scheduler: kvscore.NewScheduler(s.scheduler()),
		sessions:  sessions,
		limit:     func(n int) { sessions.SetLimits(n, sessionBytes(n)) },
		seed:      rand.Uint64(), //nolint:gosec // unknown outside of the process is enough
		stop:      make(chan struct{}),
		workers:   make(map[string]*worker),
	}
	p.responses.seed = p.seed
	p.settings.Store(s)
	p.queue.pool = p
	p.unnamed = p.nameless()
	retriesDenied.WithLabelValues(name) // so that its 0 is visible
	p.declareAll(s)
	go p.maintain()
	return p, nil
}

// sessionBytes returns the memory for n sessions with keys of usual length.
func sessionBytes(n int) int64 { return max(int64(n)*384, 1<<20) }

func (s *poolSettings) scheduler() kvscore.Settings {
	return kvscore.Settings{Memory: s.memory, BlockSize: s.blockSize}
}

// Destruct ends the upkeep and closes the store.
func (p *pool) Destruct() error {
	close(p.stop)
	return p.sessions.Close()
}

// logger returns the logger of the pool, which no configuration owns.
func (p *pool) logger() *zap.Logger {
	return caddy.Log().Named("http.handlers.kv_router").With(zap.String("pool", p.name))
}

// agree adds the settings of one more handler, and returns those of all handlers of its
// configuration. The metrics registry identifies the configuration.
func (p *pool) agree(config *prometheus.Registry, s *poolSettings) (*sharedSettings, error) {
	p.agreeMu.Lock()
	defer p.agreeMu.Unlock()
	if p.config != config || p.agreed == nil {
		p.config, p.agreed = config, &sharedSettings{all: s}
		return p.agreed, nil
	}
	if err := p.agreed.add(s); err != nil {
		return nil, fmt.Errorf("pool %s: handlers that name it contradict each other: %w", p.name, err)
	}
	return p.agreed, nil
}

// apply makes the settings those of the pool, and returns whether they differ.
func (p *pool) apply(s *poolSettings) bool {
	defer p.queue.look() // without the lock
	p.mu.Lock()
	defer p.mu.Unlock()
	p.adoptBlockSize(s)
	old := p.settings.Swap(s)
	for dial := range old.upstreams {
		if w := p.workers[dial]; w != nil && !s.upstreams[dial] {
			w.seen.Store(time.Now().Unix()) // it was an upstream until now
		}
	}
	p.unnamed.configure(s.worker(dialOthers))
	p.scheduler.Apply(s.scheduler())
	go func() { // in steps, between which requests go on
		for p.scheduler.Step(2048) {
			runtime.Gosched()
		}
	}()
	p.limit(s.maxSessions)
	p.renumber(s)
	for dial, w := range p.workers {
		set := s.worker(dial)
		if s.others || s.upstreams[dial] { // else requests may still wait for it with the old limit
			w.slots.limit.Store(int64(set.MaxRunning))
		}
		p.declareRanks(w, set)
		w.configure(set)
	}
	p.declareAll(s)
	return !reflect.DeepEqual(old, s)
}

// renumber replaces the workers whose id changes. An id may move from one address to
// another: all old targets are retired and emptied before any new one is declared. The
// lock is held.
func (p *pool) renumber(s *poolSettings) {
	var old []*worker
	for dial, w := range p.workers {
		if s.worker(dial).ID == w.id {
			continue
		}
		old = append(old, w)
		delete(p.workers, dial)
		p.retireRanks(w, 0, w.ranks())
		for rank := range w.ranks() { // some may still have leases
			p.scheduler.Clear(w.target(rank))
		}
	}
	for _, w := range old {
		fresh := p.declare(w.dial)
		fresh.slots = w.slots // the requests that run at the address still do
		if w.drain.Load()&drainAsked != 0 {
			fresh.drain.Or(drainAsked) // the operator drained the address
		}
	}
}

// worker returns the worker behind an address, new ones included.
func (p *pool) worker(dial string) *worker {
	if w := p.known(dial); w != nil {
		return w
	}
	if !speakable(dial) {
		return p.unnamed // the proxy returns the error
	}
	w := p.other(dial)
	if w == p.unnamed {
		p.incidents.met(time.Now(), "more workers than are told apart", p.logger)
	}
	return w
}

// other returns the worker behind an address that was not known yet.
func (p *pool) other(dial string) *worker {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.workers[dial] == nil && !p.settings.Load().isNamed(dial) {
		if !p.hasRoom(time.Now()) {
			return p.unnamed
		}
		p.others++
	}
	return p.declare(dial)
}

// known returns the worker behind an address, nil if it is not known.
func (p *pool) known(dial string) *worker {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.workers[dial]
}

// declareAll makes the static upstreams known whose addresses have no placeholders. The
// lock is held, or nothing uses the pool yet.
func (p *pool) declareAll(s *poolSettings) {
	for dial := range s.upstreams {
		if !strings.Contains(dial, "{") {
			p.countFromZero(p.declare(dial))
		}
	}
}

// declare makes the worker behind an address known. The lock is held.
func (p *pool) declare(dial string) *worker {
	if w := p.workers[dial]; w != nil {
		return w
	}
	set := p.settings.Load().worker(dial)
	w := newWorker(set)
	p.workers[dial] = w
	p.declareRanks(w, set)
	p.layout.Add(1)
	return w
}

// peek returns the worker behind an address without making it known to the pool.
func (p *pool) peek(dial string) *worker {
	if w := p.known(dial); w != nil {
		return w
	}
	return newWorker(p.settings.Load().worker(dial))
}

func newWorker(set workerSettings) *worker {
	w := &worker{dial: set.Dial, id: set.ID, slots: new(slots), probed: make(chan struct{})}
	w.dp.Store(int32(set.DPSize))
	w.slots.limit.Store(int64(set.MaxRunning))
	w.seen.Store(time.Now().Unix())
	w.configure(set)
	return w
}

// configure stores the worker's settings.
func (w *worker) configure(set workerSettings) {
	if set.Drain {
		w.drain.Or(drainConfigured)
	} else {
		w.drain.And(^drainConfigured)
	}
	w.taints.Store(nil)
	if len(set.Taints) > 0 {
		w.taints.Store(&set.Taints)
	}
	if len(set.Models) == 0 {
		w.configured.Store(nil)
		return
	}
	models := make(map[string]bool, len(set.Models))
	for _, m := range set.Models {
		models[m] = true
	}
	w.configured.Store(&models)
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
			if n := p.scheduler.Expire(t); n > 0 {
				p.logger().Warn("leases had leaked and were ended", zap.Int("leases", n))
			}
			if n := p.scheduler.Stats().Untracked; n > untracked {
				untracked = n
				p.incidents.met(t, "no room in the cache model for some prompts", p.logger)
			}
			p.forget(t)
			if p.memory.Upkeep(t) > 0 {
				p.incidents.met(t, "slow uploads ended", p.logger)
			}
			p.incidents.settle(t, p.logger())
		}
	}
}

// forget drops workers that have been no upstreams for workerGrace. Dynamic upstreams
// are seen only by requests: their time ends at the last request.
func (p *pool) forget(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scheduler.Retire(p.unnamed.target(0)) // again: it remembers only so many
	s := p.settings.Load()
	last := t.Unix()
	if s.others {
		last = p.used.Load()
	}
	for dial, w := range p.workers {
		if !s.upstreams[dial] && last-w.seen.Load() > int64(workerGrace/time.Second) {
			p.drop(w)
		}
	}
}

// derivedID returns the default id of the worker at an address. Its 53 bits survive
// clients that read JSON numbers as floats.
func derivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}
