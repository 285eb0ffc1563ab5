// Package worker is one worker: its health, capacity, models, ranks and roles, what is known of its
// engine, and the attempts that wait for it. It knows no pool, no configuration and no request.
package worker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"

	"github.com/caddyserver/caddy/v2"
)

// Worker is one engine process behind one dial address.
type Worker struct {
	// each choice reads these of all workers
	seen       atomic.Int64                    // last time that it was an upstream, Unix seconds
	list       atomic.Pointer[ModelList]       // its own models; nil if it has no list
	configured atomic.Pointer[map[string]bool] // the operator's list; nil if there is none
	slots      *slots
	room       room
	onDemand   onDemand
	drain      atomic.Uint32 // reasons, see drainConfigured
	serves     atomic.Uint32 // see serves
	// drainVersion counts the calls of all routers' admin APIs that began or ended a drain.
	drainVersion atomic.Uint64
	Health       Health
	Past         *observe.Worker

	Dial   string
	ID     uint64
	dp     atomic.Int32             // data-parallel ranks
	taints atomic.Pointer[[]string] // configured

	engine     atomic.Pointer[engine.Engine]
	progress   progress
	probed     chan struct{} // closed after the first probe
	probedOnce sync.Once     // closes probed
	derenders  chan struct{} // full while the engine derenders
	speculates atomic.Int32  // number of speculative prefills

	// what discovery finds out
	probing probing
	loads   loadReports
	events  subscription
	reports reports
	check   eventsCheck
	Warned  observe.Incidents // what its engine is warned of
}

// New returns a worker of a pool, which need not know it.
func New(pool string, set Settings) *Worker {
	w := &Worker{
		Dial: set.Dial, ID: set.ID, Past: observe.NewWorker(pool, set.Dial), slots: new(slots), probed: make(chan struct{}),
		derenders: make(chan struct{}, 1),
	}
	w.Describe(set, engine.Info{})
	w.dp.Store(int32(set.DPSize))
	w.LimitSlots(set)
	w.See(time.Now().Unix())
	w.Configure(set)
	return w
}

// Succeed takes over the requests and the drain of the worker that was at the same address with another
// id.
func (w *Worker) Succeed(old *Worker) {
	w.slots = old.slots // the address still runs its requests
	if old.drain.Load()&drainAsked != 0 {
		w.drain.Or(drainAsked) // the operator drained the address
	}
}

// See records that the worker is an upstream, at a time in Unix seconds.
func (w *Worker) See(second int64) {
	if w.seen.Load() != second { // all processors share what is only read
		w.seen.Store(second)
	}
}

// Seen returns when the worker was last an upstream, in Unix seconds.
func (w *Worker) Seen() int64 { return w.seen.Load() }

// Derender waits until the engine may derender: one call at a time, and half of the time. It takes
// the CPU that the engine's other streams need. Call done after the call.
func (w *Worker) Derender(ctx context.Context) (done func(), err error) {
	select {
	case w.derenders <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	begun := time.Now()
	return func() { time.AfterFunc(min(time.Since(begun), time.Second), func() { <-w.derenders }) }, nil
}

// maxSpeculative is how many speculative prefills a worker has at a time.
const maxSpeculative = 2

// Speculate registers a speculative prefill, until the caller calls end. ok is false if there are
// too many.
func (w *Worker) Speculate() (end func(), ok bool) {
	end = func() { w.speculates.Add(-1) }
	if w.speculates.Add(1) > maxSpeculative {
		end()
		return nil, false
	}
	return end, true
}

// Speculating returns how many speculative prefills the worker has.
func (w *Worker) Speculating() int { return int(w.speculates.Load()) }

// DerivedID returns the default id of the worker at an address. Its 53 bits survive
// clients that read JSON numbers as floats.
func DerivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}

// Configure stores the worker's settings.
func (w *Worker) Configure(set Settings) {
	if set.Drain != nil && *set.Drain {
		w.drain.Or(drainConfigured)
	} else {
		w.drain.And(^drainConfigured)
	}
	w.taints.Store(&set.Taints)
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

// Tainted returns the taints that the operator configured for the worker.
func (w *Worker) Tainted() []string { return *w.taints.Load() }

// MarkProbed records the end of a probe.
func (w *Worker) MarkProbed() { w.probedOnce.Do(func() { close(w.probed) }) }

// AwaitProbes waits for the first probes of workers, for so long at most.
func AwaitProbes(ctx context.Context, within time.Duration, workers []*Worker) {
	timeout := time.After(within)
	for _, w := range workers {
		select {
		case <-w.probed:
		case <-timeout:
			return
		case <-ctx.Done():
			return
		}
	}
}

// WasProbed returns whether a probe of the worker has ended.
func (w *Worker) WasProbed() bool {
	select {
	case <-w.probed:
		return true
	default:
		return false
	}
}

// Ranks returns how many data-parallel ranks the worker has. Each is a target with a KV
// cache of its own.
func (w *Worker) Ranks() int { return max(1, int(w.dp.Load())) }

// Target returns one of the worker's targets.
func (w *Worker) Target(rank int) kvscore.Target {
	return kvscore.Target{Worker: w.ID, Rank: uint32(rank)}
}

// SetRanks records how many ranks the worker has, and returns how many it had.
func (w *Worker) SetRanks(n int) (before int) {
	before = w.Ranks()
	w.dp.Store(int32(n))
	return before
}

// Host returns the host of the worker's address, or all of the address of a Unix socket.
func (w *Worker) Host() string {
	if network, host, _, err := caddy.SplitNetworkAddress(w.Dial); err == nil && !caddy.IsUnixNetwork(network) {
		return host
	}
	return w.Dial
}
