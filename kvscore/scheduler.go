package kvscore

import (
	"cmp"
	"runtime"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Defaults of Settings.
const (
	DefaultMemory    = 512 << 20
	DefaultBlockSize = 16
	// DefaultCapacity is the KV cache of an engine of unknown size, in tokens: about that
	// of an 8B model on a 48 GB card.
	DefaultCapacity = 262_144
	// DefaultLeaseExpiry is far longer than the silence of an engine in a request.
	DefaultLeaseExpiry = 15 * time.Minute
)

// Settings of a Scheduler; zero values stand for the defaults.
type Settings struct {
	// Memory bounds the index, in bytes. Default: 512 MiB.
	Memory int64
	// BlockSize is the number of tokens in one KV block. Default: 16.
	BlockSize int
	// LeaseExpiry is how long a lease lives without a sign of life from its request. It
	// is a last resort against leaks. Default: 15 minutes.
	LeaseExpiry time.Duration
	// Bounded says that targets also fill up while the pool has learned no times: see [Scheduler.Room].
	Bounded bool
}

// Scheduler chooses targets and books requests on them. It keeps the load of each target,
// and a model of its KV cache. Leases are the only way to change a load; [Scheduler.ReportLoad]
// adds the load of other clients beside it. It is safe for concurrent use.
type Scheduler struct {
	mu       sync.Mutex
	settings Settings
	caches   *cache.Caches // has a lock of its own
	targets  map[Target]*load
	leases   map[*Lease]struct{}
	latency  *estimator
	traffic  traffic
	routers  routers
	transfer speed   // of the transfers, relative to assumedTransfer
	learned  float64 // logarithm of capacity/declared, over all targets
	restored map[Target]*LearnedTarget
	journal  Journal
	onLost   func(t Target, tokens int64)
	onRoom   func(t Target)

	depth, prefilled int64 // see SetDepth, Prefilled

	totals Totals
}

// Journal is told what a scheduler does. Its methods return at once. They must not call the
// scheduler, which may hold its lock.
type Journal interface {
	// Booked is told of a request, and what the cache models said of it. It returns a number for
	// Ended; 0 is none. expected is the length of the answer, if it is known. phase is PhaseDecode if
	// the request is split.
	Booked(now time.Time, t Target, p *cache.Prompt, v *cache.View, streamed bool, expected int64, phase Phase) (request uint64)
	// Answered is told of the first sign that the prefill of a request is over. tokens is the length
	// of an answer that was not streamed, -1 if it is unknown.
	Answered(request uint64, now time.Time, how Sign, tokens int64)
	// Ended is told of the end of a request. If the target has computed the prompt and has not lost
	// it since, computed is set. tokens is the length of the answer. The counts are zero if they
	// cannot be right. The answer is its blocks behind those of the prompt, nil if they are unknown.
	Ended(request uint64, computed bool, tokens int64, n Counts, answer []uint64)
}

// Sign is what showed that a prefill is over.
type Sign uint8

// The signs, by the methods of [Lease].
const (
	SignFirstToken Sign = iota
	SignAnswered
	SignPrefilled
)

// SetJournal sets the scheduler's journal. Call it before all else.
func (s *Scheduler) SetJournal(j Journal) { s.journal = j }

// OnLost sets what is called when a target is found to have lost its cache, without the lock. tokens is
// what the cache model held, and what has been computed since is there again. Call it before all else.
func (s *Scheduler) OnLost(f func(t Target, tokens int64)) { s.onLost = f }

// NewScheduler returns a scheduler without targets.
func NewScheduler(s Settings) *Scheduler {
	s = s.withDefaults()
	return &Scheduler{
		settings: s, caches: cache.New(s.Memory, s.BlockSize), targets: make(map[Target]*load),
		leases: make(map[*Lease]struct{}), latency: newEstimator(), traffic: traffic{answer: assumedAnswer},
		onRoom: func(Target) {},
	}
}

// Caches returns the cache models of the targets. The scheduler opens and closes their slots.
func (s *Scheduler) Caches() *cache.Caches { return s.caches }

func (s Settings) withDefaults() Settings {
	s.Memory = cmp.Or(s.Memory, DefaultMemory)
	s.BlockSize = cmp.Or(s.BlockSize, DefaultBlockSize)
	s.LeaseExpiry = cmp.Or(s.LeaseExpiry, DefaultLeaseExpiry)
	return s
}

// Apply changes the settings of a scheduler in use. It removes only what no longer fits,
// in steps: see [cache.Caches.Step].
func (s *Scheduler) Apply(settings Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings = settings.withDefaults()
	s.caches.Apply(s.settings.Memory, s.settings.BlockSize)
}

// Declare adds a target, or changes the capacity of its KV cache, in tokens. 0 stands for
// DefaultCapacity. It reverts a Retire.
func (s *Scheduler) Declare(t Target, capacity int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.declare(t, capacity).retired = false
}

func (s *Scheduler) declare(t Target, capacity int64) *load {
	if capacity <= 0 {
		capacity = DefaultCapacity
	}
	ld := s.targets[t]
	if ld == nil {
		ld = &load{target: t, slot: s.caches.Open(t, capacity)}
		s.targets[t] = ld
		s.routers.dirty = true
	}
	if ld.declared != capacity {
		ld.keeping = keeping{}
		ld.declared, ld.capacityStep, ld.learned, ld.applied = capacity, step{}, -s.learned, s.learned
		ld.capacity = capacity
		ld.slot.Resize(capacity)
		s.restoreCapacity(ld)
	}
	return ld
}

// with calls f with the load of a target, if that is known. The lock is held meanwhile.
func (s *Scheduler) with(t Target, f func(ld *load)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ld := s.targets[t]; ld != nil {
		f(ld)
	}
}

// SetPage sets the tokens in the smallest block that a target's engine reuses. 0 is unknown
// and stands for Settings.BlockSize.
func (s *Scheduler) SetPage(t Target, tokens int64) {
	s.with(t, func(ld *load) { ld.slot.SetPage(max(0, tokens)) })
}

// Clear records that a target has lost its cache, for example by a restart. Its leases stay
// booked, but do not change the cache model when they end.
func (s *Scheduler) Clear(t Target) {
	var slot *cache.Slot
	s.with(t, func(ld *load) { ld.keeping, slot = keeping{}, ld.slot })
	if slot != nil {
		slot.Lose()
	}
}

// Forget removes a target that has no leases. It returns false if the target has some.
func (s *Scheduler) Forget(t Target) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.forget(t)
}

func (s *Scheduler) forget(t Target) bool {
	ld := s.targets[t]
	if ld == nil {
		return true
	}
	if ld.requests > 0 {
		return false
	}
	ld.slot.Close()
	delete(s.targets, t)
	s.routers.dirty = true
	ld.forgotten = true
	return true
}

// Retire removes a target as soon as it has no leases. Declare reverts it. Requests may book a
// target that is not declared: it is retired from the beginning.
func (s *Scheduler) Retire(t Target) {
	s.with(t, func(ld *load) {
		ld.retired = true
		s.forget(t)
	})
}

// Expire ends the leases without a sign of life for Settings.LeaseExpiry, and returns their
// number. It also does what a lower memory, or lost caches, have left to do. The owner calls it
// regularly.
func (s *Scheduler) Expire(now time.Time) int {
	n := s.expire(now)
	for range stepsAtOnce {
		if !s.caches.Step(stepWork) {
			break
		}
		runtime.Gosched() // others may wait for the lock
	}
	return n
}

func (s *Scheduler) expire(now time.Time) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for l := range s.leases {
		if l.quiet(now) >= s.settings.LeaseExpiry {
			s.end(l, false, nil)
			n++
		}
	}
	s.totals.Expired += uint64(n)
	s.caches.Expire(now)
	return n
}

const (
	// stepWork is the work of one Step in Expire, a fraction of a millisecond.
	// stepsAtOnce bounds the number of steps, so that Expire returns within seconds.
	stepWork    = 2048
	stepsAtOnce = 10_000
)
