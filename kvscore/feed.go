package kvscore

import (
	"slices"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index/exact"
)

// Knowledge is where a cache model comes from.
type Knowledge uint8

const (
	// Approximate is a cache model from the router's own requests.
	Approximate Knowledge = iota
	// Partial is an approximate model beside events that name a part of what the target
	// holds. The deeper overlap counts.
	Partial
	// Exact is a cache model from events that name all that the target holds.
	Exact
)

// String returns the name in the admin API and in metrics.
func (k Knowledge) String() string { return [...]string{"approximate", "partial", "exact"}[k] }

// FeedInfo is what a feed's owner knows of the engine.
type FeedInfo struct {
	// Knowledge says how far the scheduler may rely on the feed.
	Knowledge Knowledge
	// BlockTokens is the number of tokens in one of the engine's blocks; 0 is unknown.
	BlockTokens int
	// Adapters and Salts say that the events name the LoRA adapter and the cache salt. The
	// scheduler does not use the feed for prompts with one if the events do not name it.
	Adapters, Salts bool
	// HitsInFlight says that the engine reuses blocks of a prefill that is still under way.
	// Otherwise it does so after the first token.
	HitsInFlight bool
}

// Feed takes what the events of one target's engine say of its KV cache. One goroutine uses
// it at a time.
type Feed struct {
	scheduler *Scheduler
	target    Target
	number    int // of the target in the exact index

	// guarded by the scheduler's lock
	info   FeedInfo
	closed bool
}

// feedTable are the feeds of a scheduler.
type feedTable struct {
	feeds      map[Target]*Feed
	numbers    []*Feed // by number; nil if the number is free
	lastNumber int
	sizes      atomic.Pointer[[]int] // see BlockSizes
}

// maxFeeds bounds the number of feeds.
const maxFeeds = 4096

// OpenFeed returns the feed of a target, which must not have one. It returns nil if there are
// too many feeds. The target need not be declared yet.
func (s *Scheduler) OpenFeed(t Target) *Feed {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &Feed{scheduler: s, target: t}
	if f.number = s.freeNumber(); f.number < 0 {
		return nil
	}
	s.numbers[f.number] = f
	s.feeds[t] = f
	if ld := s.targets[t]; ld != nil {
		ld.feed = f
	}
	return f
}

// freeNumber returns a number that no feed has. It takes the free ones in turn, because a
// request may have looked up an earlier target of the number a moment ago.
func (s *Scheduler) freeNumber() int {
	for i := range s.numbers {
		if n := (s.lastNumber + 1 + i) % len(s.numbers); s.numbers[n] == nil {
			s.lastNumber = n
			return n
		}
	}
	if len(s.numbers) >= maxFeeds {
		return -1
	}
	s.numbers = append(s.numbers, nil)
	s.lastNumber = len(s.numbers) - 1
	return s.lastNumber
}

// Close ends the feed. The scheduler forgets what it said.
func (f *Feed) Close() {
	s := f.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.closed {
		return
	}
	f.closed, f.info = true, FeedInfo{}
	s.countSizes()
	s.landAll(f)
	s.exact.Clear(f.number)
	s.numbers[f.number] = nil
	if s.feeds[f.target] == f {
		delete(s.feeds, f.target)
	}
	if ld := s.targets[f.target]; ld != nil && ld.feed == f {
		ld.feed = nil
	}
}

// Describe tells the scheduler what the owner knows of the engine.
func (f *Feed) Describe(info FeedInfo) {
	s := f.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.closed {
		return
	}
	f.info = info
	s.countSizes()
}

// Stored records blocks that the target holds now. The feed sets Target in b. It returns how
// many blocks it has recorded, and why not all.
func (f *Feed) Stored(b *exact.Stored) (int, exact.Outcome) {
	b.Target = f.number
	return f.scheduler.exact.Store(b)
}

// Removed records blocks, by the engine's names, that the target no longer holds in a tier.
// It returns how many of the names are unknown.
func (f *Feed) Removed(t exact.Tier, names []uint64) (unknown int) {
	return f.scheduler.exact.Remove(f.number, t, names)
}

// Reset forgets all that the feed said, and the prompts in flight: the engine may be another
// one. The approximate cache model stays.
func (f *Feed) Reset() {
	s := f.scheduler
	s.exact.Clear(f.number)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.landAll(f)
}

// Cleared records that the target's cache is empty.
func (f *Feed) Cleared() {
	f.Reset()
	f.scheduler.Clear(f.target)
}

// Missed records that the feed begins in the middle of the engine's life. It is incomplete until
// the next Reset or Cleared.
func (f *Feed) Missed() { f.scheduler.exact.Miss(f.number) }

// Incomplete reports whether the index had no room for some of what the feed said.
func (f *Feed) Incomplete() bool { return f.scheduler.exact.Incomplete(f.number) }

// Blocks returns how many blocks the target holds in a tier, as the feed said.
func (f *Feed) Blocks(t exact.Tier) int64 { return f.scheduler.exact.Blocks(f.number, t) }

// BlockSizes returns the sizes of the blocks, in tokens, for which requests should have an
// [Identity]: those of the feeds that count. The caller must not change the list.
func (s *Scheduler) BlockSizes() []int {
	if sizes := s.sizes.Load(); sizes != nil {
		return *sizes
	}
	return nil
}

// maxSizes bounds the block sizes: each costs a hash of each prompt.
const maxSizes = 4

// countSizes lists the block sizes in use. The lock is held.
func (s *Scheduler) countSizes() {
	var sizes []int
	for _, f := range s.numbers {
		if f != nil && f.info.Knowledge != Approximate && f.info.BlockTokens > 0 && !slices.Contains(sizes, f.info.BlockTokens) && len(sizes) < maxSizes {
			sizes = append(sizes, f.info.BlockTokens)
		}
	}
	s.sizes.Store(&sizes)
}
