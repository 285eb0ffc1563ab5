package kvscore

import (
	"runtime"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// Defaults of Settings.
const (
	DefaultMemory    = 512 << 20
	DefaultBlockSize = 16
	// DefaultCapacity is the KV cache of an engine that nobody described: about
	// that of an 8B model on a 48 GB card.
	DefaultCapacity = 262_144
	// DefaultLeaseExpiry is far longer than an engine is silent in a request.
	DefaultLeaseExpiry = 15 * time.Minute
)

// Settings of a Scheduler; zero values stand for the defaults.
type Settings struct {
	// Memory bounds what the index keeps, in bytes. Default: 512 MiB.
	Memory int64
	// BlockSize is the number of tokens in one KV block. Default: 16.
	BlockSize int
	// LeaseExpiry is how long a lease lives without any sign of life from its
	// request. It is a last resort against leaks. Default: 15 minutes.
	LeaseExpiry time.Duration
}

// Scheduler chooses targets and keeps the books about the choices: a mirror of
// each target's KV cache, and what is booked on it. Leases are the only way to
// change the books. It is safe for concurrent use.
type Scheduler struct {
	mu       sync.Mutex
	settings Settings
	index    *index.Index
	match    index.Match // scratch of snapshot
	targets  map[Target]*load
	slots    []*load // by slot; nil where nobody has it
	retired  map[Target]struct{}
	leases   leaseList
	live     int
	latency  *estimator
	traffic  traffic
	learned  float64 // logarithm of capacity/declared, over all targets

	fallback LeastLoad // where a policy makes no choice

	expired, untracked, policyFaults uint64 // see Stats
}

// NewScheduler returns a scheduler without targets.
func NewScheduler(s Settings) *Scheduler {
	sch := &Scheduler{targets: make(map[Target]*load), retired: make(map[Target]struct{})}
	sch.settings = s.withDefaults()
	sch.latency = newEstimator()
	sch.traffic.answer = assumedAnswer
	sch.index = index.New(sch.settings.Memory)
	return sch
}

func (s Settings) withDefaults() Settings {
	if s.Memory == 0 {
		s.Memory = DefaultMemory
	}
	if s.BlockSize == 0 {
		s.BlockSize = DefaultBlockSize
	}
	if s.LeaseExpiry == 0 {
		s.LeaseExpiry = DefaultLeaseExpiry
	}
	return s
}

// Apply changes the settings of a scheduler in use. Nothing is forgotten but
// what no longer fits, and that little by little: see Step.
func (s *Scheduler) Apply(settings Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings = settings.withDefaults()
	s.index.SetMemory(s.settings.Memory)
}

// Declare makes a target known, or changes its capacity: the tokens that its
// KV cache has room for, DefaultCapacity if 0. It takes back a Retire.
func (s *Scheduler) Declare(t Target, capacity int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.retired, t)
	s.declare(t, capacity)
}

func (s *Scheduler) declare(t Target, capacity int64) *load {
	if capacity <= 0 {
		capacity = DefaultCapacity
	}
	ld := s.targets[t]
	if ld == nil {
		ld = &load{target: t, slot: s.freeSlot()}
		s.targets[t] = ld
		s.slots[ld.slot] = ld
	}
	if ld.declared != capacity {
		ld.declared, ld.capacityStep, ld.learned, ld.applied = capacity, step{}, -s.learned, s.learned
		ld.capacity = capacity
		s.index.SetCapacity(ld.slot, capacity)
	}
	return ld
}

// SetPage sets how many tokens a block has that the engine of a target reuses
// whole; 0 is unknown, and Settings.BlockSize stands in for it.
func (s *Scheduler) SetPage(t Target, tokens int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ld := s.targets[t]; ld != nil {
		ld.page = max(0, tokens)
	}
}

// freeSlot returns a slot that nobody has and that holds nothing of whoever had
// it before.
func (s *Scheduler) freeSlot() int {
	for i, ld := range s.slots {
		if ld == nil && s.index.Idle(i) {
			return i
		}
	}
	s.slots = append(s.slots, nil)
	return len(s.slots) - 1
}

// Clear takes in that a target has lost its cache, as by a restart. What is
// booked there stays booked; it leaves no trace in the mirror when it ends.
func (s *Scheduler) Clear(t Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ld := s.targets[t]
	if ld == nil {
		return
	}
	ld.restarts++
	s.index.Clear(ld.slot)
	if s.index.Idle(ld.slot) {
		return
	}
	// Emptying a large mirror takes a while, and requests in flight use theirs:
	// the target goes on with an empty one.
	if s.index.InUse(ld.slot) > 0 {
		ld.before = append(ld.before, ld.slot)
	}
	s.slots[ld.slot] = nil
	ld.slot = s.freeSlot()
	s.slots[ld.slot] = ld
	s.index.SetCapacity(ld.slot, ld.capacity)
}

// Forget removes a target that has no leases, and tells whether it did.
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
	s.index.Clear(ld.slot)
	s.slots[ld.slot] = nil
	delete(s.targets, t)
	ld.forgotten = true
	return true
}

// maxRetired bounds the retired targets remembered.
const maxRetired = 1024

// Retire removes a target as soon as it has no leases, at once if it has none,
// and again after requests that are booked on it later, as their list of targets
// was older. Declare takes it back.
func (s *Scheduler) Retire(t Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.retired) >= maxRetired {
		for old := range s.retired {
			if s.targets[old] == nil {
				delete(s.retired, old)
			}
		}
	}
	s.retired[t] = struct{}{}
	s.forget(t)
}

// Expire ends the leases without a sign of life since Settings.LeaseExpiry and
// returns how many. To be called every now and then.
func (s *Scheduler) Expire(now time.Time) int {
	n := s.expire(now)
	for range stepsAtOnce {
		if !s.Step(stepWork) {
			break
		}
		runtime.Gosched() // to whoever waits for the lock
	}
	return n
}

func (s *Scheduler) expire(now time.Time) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for l := s.leases.first; l != nil; {
		next := l.next
		if l.quiet(now) >= s.settings.LeaseExpiry {
			s.end(l, false, nil)
			n++
		}
		l = next
	}
	s.expired += uint64(n)
	return n
}

const (
	// stepWork is what Expire lets Step do at once, a fraction of a
	// millisecond; stepsAtOnce is how often, so that it returns within seconds.
	stepWork    = 2048
	stepsAtOnce = 10_000
)

// Step does some of the work that the mirrors are behind with, after memory or
// a capacity was lowered or a target lost its cache: about so many records are
// visited, of which a thousand take some 0.1 ms. It returns whether there is
// more. Expire calls it, too, until nothing is left.
func (s *Scheduler) Step(work int) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.index.Step(work)
}
