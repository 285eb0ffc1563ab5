// Package pool is the workers: health, capacity, queue, models, seats. It survives
// reloads, and knows no configuration and no request. What is found out of the workers'
// engines is in package discovery.
package pool

import (
	"context"
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
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"

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
	lifetime
	Ratios    texts.Ratios
	Asking    atomic.Int32                 // questions for token ids under way
	keys      atomic.Pointer[journal.Keys] // of all hashes: nobody outside can choose collisions
	Responses responses
	Members   members
	agreement

	Sessions *affinity.Bindings
	Closer   Closer
	queue    waiters
	Budget   budget
	Promises Promises
	Aborts   Aborts
	Memory   body.Memory // of request bodies
	Pairs    Pairs
	Choices  observe.Choices
	Outcomes observe.Outcomes // of classes
	kept     kept
	shared   shared
	Quota    quota.Book
	Tenants  tenants

	gathered sync.Pool // of *Candidates
}

// lifetime is what ends with a pool.
type lifetime struct {
	life    context.Context
	endLife context.CancelFunc
	tasks   sync.WaitGroup // see Go
}

// Life ends when the pool ends.
func (l *lifetime) Life() context.Context { return l.life }

// Go runs a task that ends with the pool, unless the pool has ended. Destruct waits for it.
func (l *lifetime) Go(task func()) {
	if l.life.Err() == nil {
		l.tasks.Go(task)
	}
}

// Sleep returns whether a context lasts for a while.
func Sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// kept is the pool's journal, and what keeps it on disk.
type kept struct {
	journal      journal.Journal
	lostReported uint64 // of the outlet's lost records

	mu       sync.Mutex
	headPath string        // of the journal whose head was read
	recalled *journal.Head // that head, if its secret and seed are in use
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
