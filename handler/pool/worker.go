package pool

import (
	"cmp"
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
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
	Recent       Recent
	figures      figures

	Dial   string
	ID     uint64
	dp     atomic.Int32             // data-parallel ranks
	taints atomic.Pointer[[]string] // configured

	engine     atomic.Pointer[engine.Engine]
	watch      Watch
	progress   progress
	probed     chan struct{} // closed after the first probe
	probedOnce sync.Once     // closes probed
	derenders  chan struct{} // full while the engine derenders
	speculates atomic.Int32  // number of speculative prefills
}

// newWorker returns a worker of the pool, which need not know it.
func (p *Pool) newWorker(set WorkerSettings) *Worker {
	w := &Worker{Dial: set.Dial, ID: set.ID, slots: new(slots), probed: make(chan struct{}), derenders: make(chan struct{}, 1)}
	w.describe(set, engine.Info{})
	w.dp.Store(int32(set.DPSize))
	w.limitSlots(set)
	w.seen.Store(time.Now().Unix())
	w.configure(set)
	w.watch = p.newWatch(p, w)
	return w
}

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

// configure stores the worker's settings.
func (w *Worker) configure(set WorkerSettings) {
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

// Reasons why a worker drains, as bits of Worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
	drainMoves             // by the admin API, and streams are moved away
	drainAsleep            // the engine sleeps
)

// Draining returns whether the worker gets no new requests.
func (w *Worker) Draining() bool { return w.drain.Load() != 0 }

// Drains returns who wants that the worker drains: the admin API, the configuration, or both.
func (w *Worker) Drains() (asked, configured bool) {
	reasons := w.drain.Load()
	return reasons&drainAsked != 0, reasons&drainConfigured != 0
}

// Asleep returns whether the worker drains because its engine sleeps.
func (w *Worker) Asleep() bool { return w.drain.Load()&drainAsleep != 0 }

// Drain lets the worker get no new requests, by the admin API's wish. It returns whether the
// worker got some before.
func (p *Pool) Drain(w *Worker) (changed bool) {
	p.kept.journal.Drained(w.ID, true, w.drainVersion.Add(1))
	return w.drain.Or(drainAsked) == 0
}

// MoveStreams has the streams of a draining worker move to others, as far as they can. It returns
// whether that is new.
func (p *Pool) MoveStreams(w *Worker) (changed bool) { return w.drain.Or(drainMoves)&drainMoves == 0 }

// EndDrain ends the admin API's wish, and returns whether there was one. The worker drains on
// if its configuration says so.
func (p *Pool) EndDrain(w *Worker) (changed bool) {
	p.kept.journal.Drained(w.ID, false, w.drainVersion.Add(1))
	return w.setDrain(false)
}

// followDrain takes over what another router's admin API was told, unless this one knows of a later
// call. If two calls come at once, the drain counts.
func (w *Worker) followDrain(drains bool, version uint64) (changed bool) {
	own := w.drainVersion.Load()
	if version < own || version == own && !drains {
		return false
	}
	w.drainVersion.Store(version)
	return w.setDrain(drains)
}

// setDrain begins or ends the admin API's wish that the worker drains.
func (w *Worker) setDrain(drains bool) (changed bool) {
	if drains {
		return w.drain.Or(drainAsked)&drainAsked == 0
	}
	return w.drain.And(^(drainAsked|drainMoves))&drainAsked != 0
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

// maxClaimed bounds how many ranks an engine can claim. Each is a target, with a stream of KV events.
const maxClaimed = 128

// declareRanks declares the worker's targets to the scheduler. Their capacity is the
// configured one, or else the one that the engine reports. The caller holds the lock, or
// nothing uses the pool yet.
func (p *Pool) declareRanks(w *Worker, set WorkerSettings) {
	e := w.Engine()
	info := &e.Info
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	size := 1
	if e.TakesRank() { // other engines choose the rank themselves
		size = max(1, cmp.Or(set.DPSize, min(info.DPSize, maxClaimed)))
	}
	before := w.Ranks()
	for rank := range size {
		p.Scheduler.Declare(w.Target(rank), capacity)
		p.Scheduler.SetPage(w.Target(rank), int64(info.BlockSize))
		// The KV cache goes from one host to another at one speed.
		p.Scheduler.SetGroup(w.Target(rank), uint32(xxh3.HashString(w.Host()))) //nolint:gosec // a part of the hash is enough
	}
	w.dp.Store(int32(size))
	p.retireRanks(w, size, before)
	if size != before {
		p.layout.Add(1)
	}
}

// Host returns the host of the worker's address, or all of the address of a Unix socket.
func (w *Worker) Host() string {
	if network, host, _, err := caddy.SplitNetworkAddress(w.Dial); err == nil && !caddy.IsUnixNetwork(network) {
		return host
	}
	return w.Dial
}

// retireRanks makes the scheduler remove targets as soon as they have no leases.
func (p *Pool) retireRanks(w *Worker, from, to int) {
	for rank := from; rank < to; rank++ {
		p.Scheduler.Retire(w.Target(rank))
	}
}

// Load returns the summed load of the worker's ranks.
func (p *Pool) Load(t time.Time, w *Worker) kvscore.Load {
	var sum kvscore.Load
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		sum.Requests += l.Requests
		sum.PrefillTokens += l.PrefillTokens
		sum.PromptBlocks += l.PromptBlocks
		sum.OutputBlocks += l.OutputBlocks
		sum.CachedTokens += l.CachedTokens
		sum.CapacityTokens += l.CapacityTokens
		sum.ReportedTokens += l.ReportedTokens
		sum.Outlier = sum.Outlier || l.Outlier
		sum.Errors = max(sum.Errors, l.Errors)
		sum.PrefillRate += l.PrefillRate
		sum.RateLearned = sum.RateLearned || l.RateLearned
		sum.CapacityLearned = sum.CapacityLearned || l.CapacityLearned
	}
	return sum
}

// Running returns how many inference requests the worker runs, and how many it may; 0 is no
// limit.
func (w *Worker) Running() (n, limit int64) { return w.slots.running.Load(), w.slots.limit.Load() }

// slots count and bound the inference attempts at one dial address. They stay when its
// worker gets another id.
type slots struct {
	running atomic.Int64
	others  atomic.Int64 // of other routers
	limit   atomic.Int64 // 0 = none
}

// full returns whether no slot is free.
func (s *slots) full() bool { return s.room() <= 0 }

// room returns how many slots are free.
func (s *slots) room() int64 {
	limit := s.limit.Load()
	if limit == 0 {
		return math.MaxInt64
	}
	return limit - s.running.Load() - s.told(limit)
}

// told returns how many of the slots count as taken by other routers. An eighth stays, at least one
// of several: else who writes false reports to the stream of share could stop all service.
func (s *slots) told(limit int64) int64 { return min(s.others.Load(), limit-(limit+6)/8) }

// take takes a slot. It returns false if none is free.
func (s *slots) take() bool {
	for {
		n := s.running.Load()
		if limit := s.limit.Load(); limit > 0 && n+s.told(limit) >= limit {
			return false
		}
		if s.running.CompareAndSwap(n, n+1) {
			return true
		}
	}
}
