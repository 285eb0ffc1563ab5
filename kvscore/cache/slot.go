package cache

import (
	"slices"
	"sync/atomic"
)

// Slot is the cache model of one target.
type Slot struct {
	caches *Caches
	target Target
	feed   atomic.Pointer[Feed] // nil without events

	number   atomic.Int32 // in the approximate index
	before   []int        // numbers from before the cache was lost that requests still use
	capacity int64        // tokens
	page     int64        // tokens in the smallest block that the engine reuses; 0 is unknown
	losses   uint64
}

// Open returns the slot of a target that has none, with the capacity of its KV cache in tokens.
func (c *Caches) Open(t Target, capacity int64) *Slot {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &Slot{caches: c, target: t, capacity: capacity}
	if f := c.feeds.of[t]; f != nil {
		f.attach(s)
	}
	s.begin()
	return s
}

// slotOf returns the slot of a target, or nil.
func (c *Caches) slotOf(t Target) *Slot {
	for _, s := range c.slots {
		if s != nil && s.target == t {
			return s
		}
	}
	return nil
}

// freeSlot returns a free number that holds nothing of an earlier target.
func (c *Caches) freeSlot() int {
	for i, s := range c.slots {
		if s == nil && c.sent.Idle(i) {
			return i
		}
	}
	c.slots = append(c.slots, nil)
	return len(c.slots) - 1
}

// Close forgets the slot, which no ticket may use. The target's feed stays.
func (s *Slot) Close() {
	c := s.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent.Clear(s.at())
	c.slots[s.at()] = nil
	if f := s.feed.Load(); f != nil {
		f.slot = nil
	}
}

// Resize changes the capacity of the target's KV cache, in tokens.
func (s *Slot) Resize(capacity int64) {
	s.caches.mu.Lock()
	defer s.caches.mu.Unlock()
	s.capacity = capacity
	s.caches.sent.SetCapacity(s.at(), capacity)
}

func (s *Slot) at() int { return int(s.number.Load()) }

// begin gives the slot a number that holds nothing.
func (s *Slot) begin() {
	c := s.caches
	number := c.freeSlot()
	s.number.Store(int32(number)) //nolint:gosec // there are few
	c.slots[number] = s
	c.sent.SetCapacity(number, s.capacity)
}

// SetPage sets the tokens in the smallest block that the engine reuses. 0 is unknown and stands
// for Settings.BlockSize.
func (s *Slot) SetPage(tokens int64) { s.page = tokens }

// Page returns the tokens in the smallest block that the engine reuses.
func (s *Slot) Page() int64 {
	if s.page > 0 {
		return s.page
	}
	return int64(s.caches.settings.BlockSize)
}

// Lose records that the target has lost its cache, for example by a restart. Tickets from before
// do not change the cache model when they end.
func (s *Slot) Lose() {
	s.caches.mu.Lock()
	defer s.caches.mu.Unlock()
	s.lose()
}

func (s *Slot) lose() {
	c := s.caches
	s.losses++
	number := s.at()
	c.sent.Clear(number)
	if c.sent.Idle(number) {
		return
	}
	// Emptying a large cache model takes a while, and requests in flight use theirs. The
	// target continues with an empty one.
	if c.sent.InUse(number) > 0 {
		s.before = append(s.before, number)
	}
	c.slots[number] = nil
	s.begin()
}

// Used returns how many tokens the target holds, as far as the router's requests tell.
func (s *Slot) Used() int64 {
	s.caches.mu.RLock()
	defer s.caches.mu.RUnlock()
	return s.caches.sent.Used(s.at())
}

// InUse returns the tokens that active requests use on the target. Shared ones count once.
func (s *Slot) InUse() int64 {
	s.caches.mu.RLock()
	defer s.caches.mu.RUnlock()
	tokens := s.caches.sent.InUse(s.at())
	for _, number := range s.before {
		tokens += s.caches.sent.InUse(number)
	}
	return tokens
}

// settle forgets the numbers from before that nothing uses any more.
func (s *Slot) settle() {
	s.before = slices.DeleteFunc(s.before, func(number int) bool { return s.caches.sent.InUse(number) == 0 })
}

// Knowledge returns where the cache model for prompts of token ids comes from.
func (s *Slot) Knowledge() Knowledge {
	if f := s.feed.Load(); f != nil {
		return f.info.Load().Knowledge
	}
	return Approximate
}
