// Package pool is the workers and all that is known of them: health, capacity, queue,
// models, engines, cache checks. It survives reloads, and knows no configuration and no
// request.
package pool

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

// Pools holds the pools by name. They survive reloads: a new configuration is
// provisioned before the old one lets go.
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
	Name      string
	Scheduler *kvscore.Scheduler
	Sessions  affinity.Store
	Responses responses
	limit     func(maxSessions int)
	Used      atomic.Int64 // last request, Unix seconds
	Live      atomic.Int64 // when a configuration began to serve last, Unix seconds
	Memory    body.Memory  // of request bodies
	Asking    atomic.Int32 // questions for token ids under way
	Ratios    kvscore.Ratios
	seed      uint64        // of content hashes: nobody outside can choose collisions
	Probers   atomic.Uint64 // that there were; numbers the next one
	stop      chan struct{}
	Incidents Incidents
	Queue     queue
	Spending  spending

	Backgrounds backgrounds

	Settings atomic.Pointer[Settings]
	Layout   atomic.Uint64 // counts up when an address gets another worker, or a worker other ranks: see table

	scratches sync.Pool // of *scratch

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

// Worker is one engine process behind one dial address.
type Worker struct {
	// each choice reads these of all workers
	Seen       atomic.Int64                    // last time that it was an upstream, Unix seconds
	Models     atomic.Pointer[ModelList]       // its own list; nil if it has none
	Configured atomic.Pointer[map[string]bool] // the operator's list; nil if there is none
	Slots      *slots
	Drain      atomic.Uint32
	Health     Health

	Dial       string
	ID         uint64
	dp         atomic.Int32 // data-parallel ranks
	Engine     engineState
	cacheCheck cacheCheck
	Flow       flow
	By         atomic.Uint64 // the prober that last had it from a dynamic source
	Probed     chan struct{} // closed after the first probe
	ProbedAt   atomic.Int64  // the last probe, Unix nanoseconds
	Probing    atomic.Bool   // a probe is under way
	Asked      atomic.Int64  // last asked what it serves, Unix nanoseconds
	Refusals   atomic.Int32  // times in a row that it would not say, for want of a key
	Hits       hits
	taints     atomic.Pointer[[]string] // configured; nil if there are none

	background atomic.Int32 // requests of the router's own that run on it

	Misses misses

	probedOnce sync.Once                      // closes probed
	ProbedFor  atomic.Pointer[SharedSettings] // the configuration that probed it last for the first time
}

func New(name string, s *Settings) (*Pool, error) {
	sessions, err := affinity.NewRistretto(affinity.Options{MaxSessions: s.MaxSessions, MaxBytes: sessionBytes(s.MaxSessions)})
	if err != nil {
		return nil, err
	}
	p := &Pool{
		Name:      name,
		Scheduler: kvscore.NewScheduler(s.scheduler()),
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

func (s *Settings) scheduler() kvscore.Settings {
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
	defer p.Queue.look() // without the lock
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
	p.Scheduler.Apply(s.scheduler())
	go func() { // in steps, between which requests go on
		for p.Scheduler.Step(2048) {
			runtime.Gosched()
		}
	}()
	p.limit(s.MaxSessions)
	p.renumber(s)
	for dial, w := range p.Workers {
		set := s.Worker(dial)
		if s.Others || s.Upstreams[dial] { // else requests may still wait for it with the old limit
			w.Slots.Limit.Store(int64(set.MaxRunning))
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
func (p *Pool) renumber(s *Settings) {
	var old []*Worker
	for dial, w := range p.Workers {
		if s.Worker(dial).ID == w.ID {
			continue
		}
		old = append(old, w)
		delete(p.Workers, dial)
		p.retireRanks(w, 0, w.Ranks())
		for rank := range w.Ranks() { // some may still have leases
			p.Scheduler.Clear(w.Target(rank))
		}
	}
	for _, w := range old {
		fresh := p.declare(w.Dial)
		fresh.Slots = w.Slots // the requests that run at the address still do
		if w.Drain.Load()&DrainAsked != 0 {
			fresh.Drain.Or(DrainAsked) // the operator drained the address
		}
	}
}

// Worker returns the worker behind an address, new ones included.
func (p *Pool) Worker(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	if !speakable(dial) {
		return p.unnamed // the proxy returns the error
	}
	w := p.other(dial)
	if w == p.unnamed {
		p.Incidents.Raise(time.Now(), "more workers than are told apart", p.Logger)
	}
	return w
}

// other returns the worker behind an address that was not known yet.
func (p *Pool) other(dial string) *Worker {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Workers[dial] == nil && !p.Settings.Load().isNamed(dial) {
		if !p.hasRoom(time.Now()) {
			return p.unnamed
		}
		p.others++
	}
	return p.declare(dial)
}

// Known returns the worker behind an address, nil if it is not known.
func (p *Pool) Known(dial string) *Worker {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	return p.Workers[dial]
}

// declareAll makes the static upstreams known whose addresses have no placeholders. The
// lock is held, or nothing uses the pool yet.
func (p *Pool) declareAll(s *Settings) {
	for dial := range s.Upstreams {
		if !strings.Contains(dial, "{") {
			p.countFromZero(p.declare(dial))
		}
	}
}

// declare makes the worker behind an address known. The lock is held.
func (p *Pool) declare(dial string) *Worker {
	if w := p.Workers[dial]; w != nil {
		return w
	}
	set := p.Settings.Load().Worker(dial)
	w := newWorker(set)
	p.Workers[dial] = w
	p.declareRanks(w, set)
	p.Layout.Add(1)
	return w
}

// peek returns the worker behind an address without making it known to the pool.
func (p *Pool) peek(dial string) *Worker {
	if w := p.Known(dial); w != nil {
		return w
	}
	return newWorker(p.Settings.Load().Worker(dial))
}

func newWorker(set WorkerSettings) *Worker {
	w := &Worker{Dial: set.Dial, ID: set.ID, Slots: new(slots), Probed: make(chan struct{})}
	w.dp.Store(int32(set.DPSize))
	w.Slots.Limit.Store(int64(set.MaxRunning))
	w.Seen.Store(time.Now().Unix())
	w.configure(set)
	return w
}

// configure stores the worker's settings.
func (w *Worker) configure(set WorkerSettings) {
	if set.Drain {
		w.Drain.Or(DrainConfigured)
	} else {
		w.Drain.And(^DrainConfigured)
	}
	w.taints.Store(nil)
	if len(set.Taints) > 0 {
		w.taints.Store(&set.Taints)
	}
	if len(set.Models) == 0 {
		w.Configured.Store(nil)
		return
	}
	models := make(map[string]bool, len(set.Models))
	for _, m := range set.Models {
		models[m] = true
	}
	w.Configured.Store(&models)
}

// All returns the workers, in no order.
func (p *Pool) All() []*Worker {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	list := make([]*Worker, 0, len(p.Workers))
	for _, w := range p.Workers {
		list = append(list, w)
	}
	return list
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
			p.Incidents.settle(t, p.Logger())
		}
	}
}

// forget drops workers that have been no upstreams for workerGrace. Dynamic upstreams
// are seen only by requests: their time ends at the last request.
func (p *Pool) forget(t time.Time) {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.Scheduler.Retire(p.unnamed.Target(0)) // again: it remembers only so many
	s := p.Settings.Load()
	last := t.Unix()
	if s.Others {
		last = p.Used.Load()
	}
	for dial, w := range p.Workers {
		if !s.Upstreams[dial] && last-w.Seen.Load() > int64(WorkerGrace/time.Second) {
			p.Drop(w)
		}
	}
}

// DerivedID returns the default id of the worker at an address. Its 53 bits survive
// clients that read JSON numbers as floats.
func DerivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}
