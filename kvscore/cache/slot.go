package cache

import (
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// Slot is the cache model of one target.
type Slot struct {
	caches *Caches
	target Target
	number int                  // in the approximate index
	feed   atomic.Pointer[Feed] // nil without events
	page   int64                // tokens in the smallest block that the engine reuses; 0 is unknown
	losses uint64
	closed bool
	// What was used before is lost, or is what an earlier run of the router has recalled: see Last.
	lost, recalled uint64
}

// Open returns the slot of a target that has none, with the capacity of its KV cache in tokens. If there
// are too many targets, the last ones share a number.
func (c *Caches) Open(t Target, capacity int64) *Slot {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := slices.IndexFunc(c.slots, func(s *Slot) bool { return s.closed && c.sent.IsEmpty(s.number) })
	if number < 0 {
		number = min(len(c.slots), approx.MaxSlots-1)
		c.slots = append(c.slots[:number], nil)
	}
	s := &Slot{caches: c, target: t, number: number}
	c.slots[number] = s
	if f := c.feeds.of[t]; f != nil {
		f.attach(s)
	}
	c.sent.SetCapacity(number, capacity)
	c.computed.SetCapacity(number, 0)
	c.computed.Clear(number)
	return s
}

// slotOf returns the slot of a target, or nil.
func (c *Caches) slotOf(t Target) *Slot {
	for _, s := range c.slots {
		if s.target == t && !s.closed {
			return s
		}
	}
	return nil
}

// Close forgets the slot, which no ticket may use. The target's feed stays. [Caches.Step] frees the
// memory.
func (s *Slot) Close() {
	c := s.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent.Forget(s.number, c.sent.Now()+1)
	s.closed = true
	if f := s.feed.Load(); f != nil {
		f.slot = nil
	}
}

// Resize changes the capacity of the target's KV cache, in tokens.
func (s *Slot) Resize(capacity int64) {
	s.caches.mu.Lock()
	defer s.caches.mu.Unlock()
	s.caches.sent.SetCapacity(s.number, capacity)
}

// SetPage sets the tokens in the smallest block that the engine reuses. 0 is unknown and stands
// for the block size of [New].
func (s *Slot) SetPage(tokens int64) { s.page = tokens }

// Page returns the tokens in the smallest block that the engine reuses.
func (s *Slot) Page() int64 {
	if s.page > 0 {
		return s.page
	}
	return int64(s.caches.blockSize)
}

// Lose records that the target has lost its cache, for example by a restart. Tickets from before
// do not change the cache model when they end. A large cache takes milliseconds: Lose lets others
// have the lock in between.
func (s *Slot) Lose() {
	c := s.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	for before := c.sent.Now() + 1; !s.closed && c.sent.Forget(s.number, before); {
		c.mu.Unlock()
		runtime.Gosched()
		c.mu.Lock()
	}
	if !s.closed {
		s.losses++
		c.sent.Clear(s.number)
		c.computed.Clear(s.number)
	}
}

// Forget records that the target has lost what was used before a time: see [Ticket.Booked]. What is in
// use stays, and so do tickets.
func (s *Slot) Forget(before uint64) {
	s.caches.mu.Lock()
	defer s.caches.mu.Unlock()
	s.forget(before)
}

func (s *Slot) forget(before uint64) {
	s.lost = before
	s.caches.sent.Forget(s.number, before)
}

// Used returns how many tokens the target holds, as far as the router's requests tell.
func (s *Slot) Used() int64 { return s.caches.sent.Used(s.number) }

// InUse returns the tokens that active requests use on the target. Shared ones count once.
func (s *Slot) InUse() int64 { return s.caches.sent.InUse(s.number) }

// Knowledge returns where the cache model for prompts of token ids comes from.
func (s *Slot) Knowledge() Knowledge {
	if f := s.feed.Load(); f != nil {
		return f.info.Load().Knowledge
	}
	return Approximate
}
