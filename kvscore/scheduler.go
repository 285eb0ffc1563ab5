package kvscore

import (
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
	targets  map[Target]*books
	slots    []*books // by slot; nil where free
	leases   leaseList
	live     int
	expired  uint64
	bookings uint64  // counts up with each booking: a snapshot's age
	rate     float64 // prefill tokens a second over all targets; 0 = not learned
}

// NewScheduler returns a scheduler without targets.
func NewScheduler(s Settings) *Scheduler {
	sch := &Scheduler{targets: make(map[Target]*books)}
	sch.settings = s.withDefaults()
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
// what no longer fits.
func (s *Scheduler) Apply(settings Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settings = settings.withDefaults()
	s.index.SetMemory(s.settings.Memory)
}

// Declare makes a target known, or changes its capacity: the tokens that its
// KV cache has room for, DefaultCapacity if 0.
func (s *Scheduler) Declare(t Target, capacity int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.declare(t, capacity)
}

func (s *Scheduler) declare(t Target, capacity int64) *books {
	if capacity <= 0 {
		capacity = DefaultCapacity
	}
	b := s.targets[t]
	if b == nil {
		b = &books{target: t, slot: s.freeSlot()}
		s.targets[t] = b
		s.slots[b.slot] = b
	}
	if b.capacity != capacity {
		b.capacity = capacity
		s.index.SetCapacity(b.slot, capacity)
	}
	return b
}

func (s *Scheduler) freeSlot() int {
	for i, b := range s.slots {
		if b == nil {
			return i
		}
	}
	s.slots = append(s.slots, nil)
	return len(s.slots) - 1
}

// Clear takes in that a target has lost its cache, as by a restart. What is
// booked there stays booked.
func (s *Scheduler) Clear(t Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.targets[t]; b != nil {
		b.restarts++
		s.index.Clear(b.slot)
	}
}

// Forget removes a target that has no leases, and tells whether it did.
func (s *Scheduler) Forget(t Target) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.targets[t]
	if b == nil {
		return true
	}
	if b.requests > 0 {
		return false
	}
	s.index.Clear(b.slot)
	s.slots[b.slot] = nil
	delete(s.targets, t)
	return true
}

// Request is what a scheduler must know of a request.
type Request struct {
	// Root identifies what prompts must have in common to share blocks at all:
	// model, LoRA, salt, kind of content.
	Root uint64
	// Blocks are the content hashes of the prompt's full blocks in order.
	Blocks []uint64
	// BlockTokens is the number of tokens in one of Blocks, estimated where
	// they are blocks of text.
	BlockTokens float64
	// Tokens is the length of the prompt, known or estimated.
	Tokens int64
	// Streamed says that the first token will be seen when it comes. The
	// prefill of other requests is taken to be over when it should be.
	Streamed bool
}

// chooseAgain bounds how often a choice is made anew because another request
// was booked meanwhile.
const chooseAgain = 2

// Select lets the policy choose among targets and books the request on the
// chosen one. bound, if not negative, is the position of the target that the
// choice is already made for; the candidates' terms are filled in all the same.
// sel keeps the terms of the choice; it is the caller's, to be used again.
func (s *Scheduler) Select(now time.Time, r *Request, targets []Target, bound int, p Policy, sel *Selection) (int, *Lease) {
	for try := 0; ; try++ {
		s.mu.Lock()
		s.snapshot(now, r, targets, sel)
		seen := s.bookings
		s.mu.Unlock()

		// the policy may be anybody's: it runs without the lock
		chosen := bound
		if bound < 0 {
			chosen = p.Choose(sel)
		}

		s.mu.Lock()
		if bound < 0 && s.bookings != seen && try < chooseAgain && len(targets) > 1 {
			// requests that arrive together would all choose the same target
			s.mu.Unlock()
			continue
		}
		lease := s.book(now, r, sel.Candidates[chosen])
		s.mu.Unlock()
		return chosen, lease
	}
}

// snapshot fills in sel for the request. The lock is held.
func (s *Scheduler) snapshot(now time.Time, r *Request, targets []Target, sel *Selection) {
	block := float64(s.settings.BlockSize)
	scale := r.BlockTokens / block // KV blocks in one of the request's blocks
	s.index.Match(r.Root, r.Blocks, &s.match)
	sel.Tokens, sel.BlockSize = r.Tokens, s.settings.BlockSize
	sel.Stems = sel.Stems[:0]
	for _, m := range s.match.Stems {
		sel.Stems = append(sel.Stems, Stem{Blocks: float64(m.Blocks) * scale, Arrivals: m.Arrivals, Holders: m.Holders})
	}
	sel.Candidates = sel.Candidates[:0]
	for _, t := range targets {
		b := s.targets[t]
		if b == nil {
			b = s.declare(t, 0)
		}
		b.settle(now)
		held, inUse := at(s.match.Held, b.slot), at(s.match.InUse, b.slot)
		sel.Candidates = append(sel.Candidates, Candidate{
			Target:         t,
			OverlapBlocks:  float64(held) * scale,
			OverlapTokens:  min(int64(float64(held)*r.BlockTokens+0.5), r.Tokens),
			PrefillTokens:  b.prefill,
			PromptBlocks:   float64(s.index.InUse(b.slot)) / block,
			UnsharedBlocks: b.unshared,
			OutputBlocks:   float64(b.output),
			RequestBlocks:  float64(len(r.Blocks)) * scale,
			SharedBlocks:   float64(inUse) * scale,
			Requests:       b.requests,
		})
	}
}

func at(depths []int32, slot int) int32 {
	if slot < len(depths) {
		return depths[slot]
	}
	return 0
}

// book makes the lease. The lock is held.
func (s *Scheduler) book(now time.Time, r *Request, c Candidate) *Lease {
	b := s.targets[c.Target]
	if b == nil { // forgotten since the snapshot
		b = s.declare(c.Target, 0)
	}
	s.bookings++
	l := &Lease{
		scheduler: s, books: b, restarts: b.restarts, booked: now,
		root: r.Root, milliTokens: int64(r.BlockTokens * 1000),
		tokens: r.Tokens, prefill: max(0, r.Tokens-c.OverlapTokens),
		unshared:  c.RequestBlocks,
		blockSize: int64(s.settings.BlockSize),
		streamed:  r.Streamed,
	}
	if l.prefill > 0 {
		l.wait = b.prefill + l.prefill
	}
	l.total = blocksOf(l.tokens, l.blockSize)
	l.seen.Store(now.UnixNano())
	l.ref, _ = s.index.Acquire(b.slot, r.Root, r.Blocks, l.milliTokens)
	b.requests++
	b.unshared += l.unshared
	b.prefill += l.prefill
	if !r.Streamed && l.prefill > 0 {
		b.expect(l, now.Add(s.prefillTime(b, l.wait)))
	}
	s.leases.push(l)
	s.live++
	return l
}

// Expire ends the leases without a sign of life since Settings.LeaseExpiry and
// returns how many. To be called every now and then.
func (s *Scheduler) Expire(now time.Time) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	limit := now.Add(-s.settings.LeaseExpiry).UnixNano()
	n := 0
	for l := s.leases.first; l != nil; {
		next := l.next
		if l.seen.Load() <= limit {
			s.end(l, false, nil)
			n++
		}
		l = next
	}
	s.expired += uint64(n)
	return n
}

// Stats are the totals of a scheduler.
type Stats struct {
	// Leases are those that have not ended; Expired counts those that had to
	// be ended by Expire, ever.
	Leases  int
	Expired uint64
	// IndexBytes and IndexBlocks are the size of the index.
	IndexBytes, IndexBlocks int64
}

// Stats returns the totals.
func (s *Scheduler) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{Leases: s.live, Expired: s.expired, IndexBytes: s.index.Bytes(), IndexBlocks: s.index.Blocks()}
}

// Load is what is booked on a target and what its mirror holds.
type Load struct {
	Target         Target
	Requests       int
	PrefillTokens  int64
	PromptBlocks   float64 // shared ones counted once
	OutputBlocks   int64
	CachedTokens   int64
	CapacityTokens int64
}

// Load returns the books of a target; false if it is not known.
func (s *Scheduler) Load(now time.Time, t Target) (Load, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.targets[t]
	if b == nil {
		return Load{Target: t}, false
	}
	b.settle(now)
	return Load{
		Target: t, Requests: b.requests, PrefillTokens: b.prefill,
		PromptBlocks:   float64(s.index.InUse(b.slot)) / float64(s.settings.BlockSize),
		OutputBlocks:   b.output,
		CachedTokens:   s.index.Used(b.slot),
		CapacityTokens: b.capacity,
	}, true
}
