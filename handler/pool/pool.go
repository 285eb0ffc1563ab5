// Package pool is the workers: health, capacity, queue, models, seats. It survives
// reloads, and knows no configuration and no request. What is found out of the workers'
// engines is in package discovery.
package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"
)

// Pools are the pools by name. They survive reloads.
var Pools = caddy.NewUsagePool()

// DefaultName is the name of the pool of handlers that name none.
const DefaultName = "default"

// Pool is the workers and all state about them. Requests may still use it after
// Destruct, which ends only its upkeep.
type Pool struct {
	*registry
	Ratios    kvscore.Ratios
	Asking    atomic.Int32                 // questions for token ids under way
	keys      atomic.Pointer[journal.Keys] // of all hashes: nobody outside can choose collisions
	Responses responses
	joined    joined

	agreeMu sync.Mutex
	config  *prometheus.Registry // identifies the configuration that was last provisioned
	agreed  *SharedSettings      // of its handlers

	Sessions *affinity.Sessions
	Closer   Closer
	queue    waiters
	Spending spending
	Promises Promises
	Aborts   Aborts
	Memory   body.Memory // of request bodies
	pairs    pairs
	Choices  observe.Choices
	kept     kept
	shared   shared
	Quota    quota.Book
	tenants  tenantsFile

	gathered sync.Pool // of *Candidates
	life     context.Context
	endLife  context.CancelFunc
	tasks    sync.WaitGroup // see Go
}

// Life ends when the pool ends.
func (p *Pool) Life() context.Context { return p.life }

// Go runs a task that ends with the pool, unless the pool has ended. Destruct waits for it.
func (p *Pool) Go(task func()) {
	if p.life.Err() == nil {
		p.tasks.Go(task)
	}
}

// Serve records that a configuration begins to serve.
func (p *Pool) Serve(t time.Time) { p.servingSince.Store(t.Unix()) }

// kept is the pool's journal, and what keeps it on disk.
type kept struct {
	journal journal.Journal
	lost    uint64 // of the outlet's, those that were reported

	mu       sync.Mutex
	tried    string        // the path whose head was read
	recalled *journal.Head // of tried, if its secret and seed are in use
	set      Journal       // as it is kept; no File: it is not
	end      context.CancelFunc
	ended    chan struct{} // closed when the log's goroutine has ended
	outlet   *journal.Outlet
	log      *journal.Log // nil while none is open
	restored Restored

	restoring atomic.Pointer[chan struct{}] // nil unless bindings are being restored; then closed
	reading   atomic.Pointer[chan struct{}] // the same for all that the journal has
}

// JournalState is how the pool's journal fares.
type JournalState struct {
	On bool `json:"-"` // a log takes it
	journal.Status
	Lost     uint64   `json:"lost_records"` // there was no room for them
	Restored Restored `json:"restored"`
}

// Restored counts what the pool took over from an earlier run.
type Restored struct {
	Sessions     int           `json:"sessions"`
	Expired      int           `json:"expired_sessions"`
	Responses    int           `json:"responses"`
	CachedTokens int64         `json:"cached_tokens"`
	Age          time.Duration `json:"-"` // of the last record
}

// shared is how a pool shares its records.
type shared struct {
	mu    sync.Mutex // of the fields up to sharer; KeepShare holds it for long
	set   Share
	end   context.CancelFunc
	ended chan struct{}

	sharer atomic.Pointer[journal.Sharer] // nil: it shares nothing
}

// Member is one configuration's way to its workers.
type Member interface {
	// Reaches returns whether a worker is one of the configuration's. The pool holds a
	// lock.
	Reaches(w *worker.Worker) bool
	// Call posts a body to a worker, as a request of the router's own.
	Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error)
}

// joined are the configurations that have joined a pool, the newest last.
type joined struct {
	mu   sync.Mutex
	list []*membership
}

// membership is a configuration in a pool. One that has ended stays for WorkerGrace if it is
// the only way to a worker, because sessions are left to be closed there.
type membership struct {
	Member
	left time.Time // zero: the configuration has not ended
}

// pairs are the pairs of a prefill and a decode worker between which a transfer has failed
// lately. Neither worker is marked down for that.
type pairs struct {
	mu    sync.Mutex
	known map[[2]uint64]pair // by the workers' ids
}

type pair struct {
	until   time.Time // it is remembered
	silent  int       // decode phases in a row
	avoided bool
}

// Hashing returns how prompts are divided into blocks.
func (p *Pool) Hashing() api.Options {
	set := p.Settings.Load()
	return api.Options{TextBlock: set.TextBlock, BlockSize: set.BlockSize, Sizes: p.Scheduler.Caches().BlockSizes(), Seed: p.keys.Load().Seed}
}

// Secret returns the secret of the hashes of session keys.
func (p *Pool) Secret() *affinity.Secret { return &p.keys.Load().Secret }

func (p *Pool) setKeys(k journal.Keys) {
	p.keys.Store(&k)
	p.Ratios.Rekey(k.Seed)
	p.Responses.seed.Store(k.Seed)
}

// Closer closes the sessions that engines keep for the router. It lives as long as the pool.
type Closer interface {
	// Ended gets an engine-backed binding that has ended, other than by Unbind.
	Ended(key affinity.Key, of *affinity.Want, why affinity.Reason)
	// Close has the engine of the target close a session.
	Close(of *affinity.Want)
	// Closes returns whether a session of an id is left to be closed on a worker.
	Closes(w *worker.Worker, id string) bool
	// Await waits until no session of an id is left to be closed on a worker.
	Await(ctx context.Context, w *worker.Worker, id string) error
	// CloseAll closes all sessions that engines still keep, for the pool ends.
	CloseAll()
}

// Join adds a configuration to the pool, until it calls leave.
func (p *Pool) Join(m Member) (leave func()) {
	one := &membership{Member: m}
	p.joined.mu.Lock()
	p.joined.list = append(p.joined.list, one)
	p.joined.mu.Unlock()
	p.pruneMembers(time.Now())
	return sync.OnceFunc(func() {
		p.joined.mu.Lock()
		one.left = time.Now()
		p.joined.mu.Unlock()
		p.pruneMembers(time.Now())
	})
}

// way returns the configuration by which the router reaches a worker: the newest, or the one that
// ended last if all have ended. nil: there is none. The caller holds the lock.
func (j *joined) way(w *worker.Worker) (m *membership) {
	for _, one := range slices.Backward(j.list) {
		switch {
		case !one.Reaches(w):
		case one.left.IsZero():
			return one
		case m == nil || one.left.After(m.left):
			m = one
		}
	}
	return m
}

// pruneMembers forgets the configurations that have ended and are no worker's only way.
func (p *Pool) pruneMembers(t time.Time) {
	workers := p.All()
	p.joined.mu.Lock()
	defer p.joined.mu.Unlock()
	needed := make(map[*membership]bool)
	for _, w := range workers {
		needed[p.joined.way(w)] = true
	}
	p.joined.list = slices.DeleteFunc(p.joined.list, func(m *membership) bool {
		return !m.left.IsZero() && (!needed[m] || t.Sub(m.left) > WorkerGrace)
	})
}

// Call posts a body to a worker by a configuration that has it.
func (p *Pool) Call(ctx context.Context, w *worker.Worker, path string, body []byte) (status int, answer []byte, err error) {
	p.joined.mu.Lock()
	m := p.joined.way(w)
	p.joined.mu.Unlock()
	if m == nil {
		return 0, nil, errors.New("no configuration has the worker")
	}
	return m.Call(ctx, w, path, body)
}
