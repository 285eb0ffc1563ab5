package pool

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
)

const (
	// maxOverflow bounds the workers of a pool from placeholders and dynamic sources.
	maxOverflow = 1024
	// overflowKept is the least time for which the pool remembers one of these.
	overflowKept = 10 * time.Second
	// maxDial is the longest address of one of these, in bytes.
	maxDial = 512
	// WorkerGrace is how long the pool remembers a worker that is no longer an upstream.
	WorkerGrace = 10 * time.Minute
	// dialOverflow is the address of the worker that stands for all above maxOverflow.
	dialOverflow = "(others)"
	// currentFor is how long one of these counts as an upstream after a request saw it.
	currentFor = time.Minute
)

// registry is the workers of a pool.
type registry struct {
	log
	aliases
	Settings  atomic.Pointer[Settings]
	Scheduler *kvscore.Scheduler
	Incidents observe.Incidents

	servingSince atomic.Int64 // when the last configuration began to serve, Unix seconds
	lastRequest  atomic.Int64 // Unix seconds; Worker.Seen is compared with it
	loose        atomic.Int64 // until then, no request is held: Unix nanoseconds
	varied       atomic.Int64 // when requests of two tenants or classes last came, one after the other: Unix nanoseconds
	last         atomic.Pointer[who]
	foreground   atomic.Int64  // when a request of no background class last came: Unix nanoseconds
	layout       atomic.Uint64 // grows when a table becomes invalid: a worker, or its ranks, changed

	mu        sync.RWMutex
	workers   map[string]*worker.Worker // by dial address
	swept     time.Time                 // when idle workers were last dropped for want of room
	overflow  *worker.Worker            // stands for the workers above maxOverflow
	blockSize int                       // of the engines, in tokens; 0 if they do not agree
}

// Serve records that a configuration begins to serve.
func (r *registry) Serve(t time.Time) { r.servingSince.Store(t.Unix()) }

// Worker returns the worker behind an address. It makes a new one known to the pool, or returns overflow if
// there is no room for one more.
func (r *registry) Worker(dial string) *worker.Worker {
	if w := r.Known(dial); w != nil {
		return w
	}
	if !validDial(dial) {
		return r.overflow // the proxy returns the error
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers[dial] == nil && !r.Settings.Load().isNamed(dial) && !r.hasRoom(time.Now()) {
		r.Raise(time.Now(), "more worker addresses than the router tracks")
		return r.overflow
	}
	return r.declare(dial)
}

// Known returns the worker behind an address, nil if it is not known.
func (r *registry) Known(dial string) *worker.Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.workers[dial]
}

// peek returns the worker behind an address without making it known to the pool.
func (r *registry) peek(dial string) *worker.Worker {
	if w := r.Known(dial); w != nil {
		return w
	}
	return worker.New(r.Name, r.Settings.Load().Worker(dial))
}

// All returns the workers, in no order.
func (r *registry) All() []*worker.Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Collect(maps.Values(r.workers))
}

// ByID returns the worker with an id, nil if the pool knows none.
func (r *registry) ByID(id uint64) *worker.Worker {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, w := range r.workers {
		if w.ID == id {
			return w
		}
	}
	return nil
}

// declareAll makes all named workers known. The caller holds the lock, or nothing uses
// the pool yet.
func (r *registry) declareAll(s *Settings) {
	for dial := range s.Upstreams {
		if s.isNamed(dial) {
			r.declare(dial).Past.FromZero()
		}
	}
}

// declare makes the worker behind an address known. The caller holds the lock.
func (r *registry) declare(dial string) *worker.Worker {
	if w := r.workers[dial]; w != nil {
		return w
	}
	w := worker.New(r.Name, r.Settings.Load().Worker(dial))
	r.workers[dial] = w
	r.declareRanks(w)
	r.layout.Add(1)
	return w
}

// renumber replaces the workers whose id changes. An id may move to another address, so
// the pool clears all old targets before it declares a new one. The caller holds the lock.
func (r *registry) renumber(s *Settings) {
	var old []*worker.Worker
	for dial, w := range r.workers {
		if s.Worker(dial).ID == w.ID {
			continue
		}
		old = append(old, w)
		delete(r.workers, dial)
		w.Close()
		w.Past.ForgetMetrics()
		r.retireRanks(w, 0, w.Ranks())
		for rank := range w.Ranks() { // a retired target stays while it has leases
			r.Scheduler.Clear(w.Target(rank))
		}
	}
	for _, w := range old {
		fresh := r.declare(w.Dial)
		fresh.Succeed(w)
		fresh.Learn(w.Engine().Info)
	}
}

// adopt replaces the settings, and returns the old ones.
func (r *registry) adopt(s *Settings) (old *Settings) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.adoptBlockSize(s)
	old = r.Settings.Swap(s)
	for dial := range old.Upstreams {
		if w := r.workers[dial]; w != nil && !s.Upstreams[dial] {
			w.See(time.Now().Unix()) // it was an upstream until now
		}
	}
	r.overflow.Configure(s.Worker(dialOverflow))
	r.Scheduler.Apply(s.schedulerSettings())
	r.renumber(s)
	for dial, w := range r.workers {
		if w.Configure(s.Worker(dial)) {
			r.layout.Add(1)
		}
		r.declareRanks(w)
		if s.Others || s.Upstreams[dial] { // else requests may still wait for it with the old limit
			w.LimitSlots(w.Settings().MaxRunning)
		}
	}
	r.declareAll(s)
	return old
}

// adoptBlockSize fills in the engines' block size, if none is configured. The caller holds
// the lock.
func (r *registry) adoptBlockSize(s *Settings) {
	if s.BlockSizeUnset && r.blockSize > 0 {
		s.BlockSize = r.blockSize
	}
}

// newOverflow makes the worker that stands for all upstreams above maxOverflow. It has no
// cache model.
func (r *registry) newOverflow() *worker.Worker {
	set := r.Settings.Load().Worker(dialOverflow)
	set.DPSize, set.MaxRunning = 1, 0
	w := worker.New(r.Name, set)
	r.Scheduler.Retire(w.Target(0))
	return w
}

// validDial returns whether an address can be that of a worker. A placeholder may yield
// any text, and addresses become labels of metrics.
func validDial(dial string) bool {
	if dial == "" || len(dial) > maxDial || !utf8.ValidString(dial) {
		return false
	}
	addr, err := caddy.ParseNetworkAddress(dial)
	return err == nil && addr.PortRangeSize() == 1
}

// isNamed returns whether the configuration names an address, without placeholders.
func (s *Settings) isNamed(dial string) bool {
	return s.Upstreams[dial] && !strings.Contains(dial, "{")
}

// hasRoom returns whether the pool may know one more worker that the configuration does
// not name. If there are too many, it drops those that were not seen lately. The caller
// holds the lock.
func (r *registry) hasRoom(t time.Time) bool {
	s := r.Settings.Load()
	most := maxOverflow + len(s.Upstreams)
	if len(r.workers) < most {
		return true
	}
	if t.Sub(r.swept) < time.Second {
		return false
	}
	r.swept = t
	r.dropIdle(s, t.Unix(), overflowKept)
	return len(r.workers) < most
}

// drop forgets a worker and its metrics, unless it has leases. It also retires the targets,
// because a request with an older table may still book on one. The caller holds the lock.
func (r *registry) drop(w *worker.Worker) {
	defer r.layout.Add(1)
	all := true
	for rank := range w.Ranks() {
		all = r.Scheduler.Forget(w.Target(rank)) && all
	}
	if !all {
		r.declareRanks(w) // its requests still need it
		return
	}
	r.retireRanks(w, 0, w.Ranks())
	delete(r.workers, w.Dial)
	w.Close()
	w.Past.Forget()
}

// IsUpstream returns whether the configuration has a worker as an upstream, or a
// placeholder or a dynamic source had it lately.
func (r *registry) IsUpstream(s *Settings, w *worker.Worker) bool {
	return s.Upstreams[w.Dial] || s.Others && r.WasOffered(w, currentFor)
}

// IsNowUpstream returns whether the worker with an id is an upstream of any configuration.
func (r *registry) IsNowUpstream(id uint64) bool {
	w := r.ByID(id)
	return w != nil && r.IsUpstream(r.Settings.Load(), w)
}

// forget drops workers that have not been upstreams for WorkerGrace. Only requests see
// dynamic upstreams, so their time stands still while there are none.
func (r *registry) forget(t time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.Settings.Load()
	last := t.Unix()
	if s.Others {
		last = r.lastRequest.Load()
	}
	r.dropIdle(s, last, WorkerGrace)
}

// dropIdle drops the workers that the configuration does not name and that were not seen for a
// time. A drain is remembered for WorkerGrace. The caller holds the lock.
func (r *registry) dropIdle(s *Settings, now int64, after time.Duration) {
	for dial, w := range r.workers {
		idle := time.Duration(now-w.Seen()) * time.Second
		if !s.isNamed(dial) && idle > after && (idle > WorkerGrace || !w.Draining()) {
			r.drop(w)
		}
	}
}

// WasOffered returns whether a request was offered a worker within a time before the last
// request.
func (r *registry) WasOffered(w *worker.Worker, within time.Duration) bool {
	return r.lastRequest.Load()-w.Seen() <= int64(within/time.Second)
}

// Raise records that a condition is met, and the error that shows it, if there is one.
func (r *registry) Raise(t time.Time, condition string, cause ...error) {
	r.Incidents.Raise(t, condition, errors.Join(cause...), r.Logger)
}

// maxClaimed bounds how many ranks an engine can claim. Each is a target, with a stream of KV events.
const maxClaimed = 128

// declareRanks declares the worker's targets to the scheduler. Their capacity is the
// configured one, or else the one that the engine reports. The caller holds the lock, or
// nothing uses the pool yet.
func (r *registry) declareRanks(w *worker.Worker) {
	set, e := w.Settings(), w.Engine()
	info := &e.Info
	capacity := cmp.Or(set.KVTokens, info.KVTokens)
	size, step := 1, info.StepTokens
	if ranks := min(info.DPSize, maxClaimed); e.TakesRank() {
		size = max(1, cmp.Or(set.DPSize, ranks))
	} else if ranks > 1 { // the engine chooses the rank itself, and all compute at once
		step = int64(ranks) * cmp.Or(step, kvscore.DefaultStepTokens)
	}
	for rank := range size {
		r.Scheduler.Declare(w.Target(rank), capacity)
		r.Scheduler.SetPage(w.Target(rank), int64(info.BlockSize))
		r.Scheduler.SetStep(w.Target(rank), step)
	}
	before := w.SetRanks(size)
	r.retireRanks(w, size, before)
	if size != before {
		r.layout.Add(1)
	}
}

// retireRanks makes the scheduler remove targets as soon as they have no leases.
func (r *registry) retireRanks(w *worker.Worker, from, to int) {
	for rank := from; rank < to; rank++ {
		r.Scheduler.Retire(w.Target(rank))
	}
}

// Load returns the summed load of the worker's ranks.
func (r *registry) Load(t time.Time, w *worker.Worker) kvscore.Load {
	var sum kvscore.Load
	for rank := range w.Ranks() {
		l, _ := r.Scheduler.Load(t, w.Target(rank))
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

// Transfers returns whether a worker is for one part of requests.
func (r *registry) Transfers() bool {
	return slices.ContainsFunc(r.All(), func(w *worker.Worker) bool { return w.IsPrefill() || w.IsDecode() })
}

// upstream returns the worker at an address, nil if it is no upstream now. It is new if no source
// has named it in this run.
func (r *registry) upstream(dial string) (w *worker.Worker, isNew bool) {
	s := r.Settings.Load()
	if !s.Upstreams[dial] && !s.Others || !validDial(dial) {
		return nil, false
	}
	isNew = r.Known(dial) == nil && !s.Upstreams[dial]
	if w = r.Worker(dial); w == r.overflow {
		return nil, false
	}
	return w, isNew
}

// Upstream returns the worker at an address, nil if it is no upstream.
func (r *registry) Upstream(dial string) *worker.Worker {
	w, _ := r.upstream(dial)
	return w
}
