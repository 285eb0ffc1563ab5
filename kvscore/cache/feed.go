package cache

import (
	"slices"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/exact"
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
	// Learned is an Exact one, for a prompt of text whose token blocks the router has learned from
	// events.
	Learned
)

var knowledge = [...]string{"approximate", "partial", "exact", "learned"}

// String returns the name in the admin API and in metrics.
func (k Knowledge) String() string { return knowledge[k] }

// UnmarshalText implements encoding.TextUnmarshaler. It takes what it does not know for Approximate.
func (k *Knowledge) UnmarshalText(text []byte) error {
	*k = Knowledge(max(0, slices.Index(knowledge[:], string(text)))) //nolint:gosec // it is small
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (k Knowledge) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Tier is where an engine keeps a block.
type Tier = exact.Tier

// The tiers, from the fastest to the slowest. They are the memory of the accelerator, that of
// the engine's machine, storage of this engine, and storage that other workers read, too.
// Tiers is their number.
const (
	Device = exact.Device
	Host   = exact.Host
	Disk   = exact.Disk
	Shared = exact.Shared
	Tiers  = exact.Tiers
)

// Stored is an event: an engine has stored consecutive blocks of a chain in a tier. Its Target
// is set by the feed.
type Stored = exact.Stored

// Outcome says whether a feed recorded all of an event.
type Outcome = exact.Outcome

// The outcomes.
const (
	OK            = exact.OK
	UnknownParent = exact.UnknownParent
	UnknownName   = exact.UnknownName
	Contradiction = exact.Contradiction
	NoRoom        = exact.NoRoom
)

// FeedInfo is what a feed's owner knows of the engine.
type FeedInfo struct {
	// Knowledge says how far a view may rely on the feed.
	Knowledge Knowledge
	// BlockTokens is the number of tokens in one of the engine's blocks; 0 is unknown.
	BlockTokens int
	// Adapters and Salts say that the events name the LoRA adapter and the cache salt. The
	// feed does not count for prompts with one if the events do not name it.
	Adapters, Salts bool
	// HitsInFlight says that the engine reuses blocks of a prefill that is still under way.
	// Otherwise it does so after the first token.
	HitsInFlight bool
}

// Feed takes what the events of one target's engine say of its KV cache. One goroutine uses
// it at a time.
type Feed struct {
	caches *Caches
	target Target
	number int // of the target in the exact index
	info   atomic.Pointer[FeedInfo]

	learns  atomic.Bool // prompts of text are under way
	growths growths     // guarded by the learner's lock

	// guarded by the caches' lock
	slot   *Slot // nil if the target has none
	closed bool
}

// feeds are the feeds of all targets.
type feeds struct {
	of      map[Target]*Feed
	numbers []*Feed // by number; nil if the number is free
	sizes   atomic.Pointer[[]int]
}

// Feed opens the feed of a target, which must not have one. It returns nil if there are too many
// feeds. The target need not have a slot yet.
func (c *Caches) Feed(t Target) *Feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := &Feed{caches: c, target: t, number: slices.Index(c.feeds.numbers, nil)}
	f.info.Store(&FeedInfo{})
	if f.number < 0 {
		if f.number = len(c.feeds.numbers); f.number == exact.MaxTargets {
			return nil
		}
		c.feeds.numbers = append(c.feeds.numbers, nil)
	}
	c.feeds.numbers[f.number] = f
	c.feeds.of[t] = f
	if s := c.slotOf(t); s != nil {
		f.attach(s)
	}
	return f
}

func (f *Feed) attach(s *Slot) {
	f.slot = s
	s.feed.Store(f)
}

// Close ends the feed. The caches forget what it said.
func (f *Feed) Close() {
	c := f.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	f.info.Store(&FeedInfo{})
	c.feeds.count()
	c.exact.Clear(f.number)
	c.feeds.numbers[f.number] = nil
	if c.feeds.of[f.target] == f {
		delete(c.feeds.of, f.target)
	}
	if f.slot != nil {
		f.slot.feed.CompareAndSwap(f, nil)
	}
}

// Describe says what the owner knows of the engine.
func (f *Feed) Describe(info FeedInfo) {
	c := f.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.closed {
		return
	}
	f.info.Store(&info)
	c.feeds.count()
}

// Stored records blocks that the target holds now. It returns how many blocks it has recorded,
// and why not all.
func (f *Feed) Stored(b *Stored) (int, Outcome) {
	b.Target = f.number
	n, outcome := f.caches.exact.Store(b)
	f.caches.learner.log(f, b, n)
	f.caches.named.log(b, n)
	return n, outcome
}

// Removed records blocks, by the engine's names, that the target no longer holds in a tier.
// It returns how many of the names are unknown.
func (f *Feed) Removed(t Tier, names []uint64) (unknown int) {
	return f.caches.exact.Remove(f.number, t, names)
}

// Reset forgets all that the feed said: the engine may be another one. The approximate cache model
// stays.
func (f *Feed) Reset() { f.reset(false) }

// Cleared records that the target's cache is empty, but for what requests use: engines say so with the
// next step, in which they compute these.
func (f *Feed) Cleared() { f.reset(true) }

func (f *Feed) reset(empty bool) {
	c := f.caches
	c.exact.Clear(f.number)
	c.learner.reset(f)
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.slot == nil {
		return
	}
	c.computed.Clear(f.slot.number)
	if empty {
		f.slot.forget(c.sent.Now() + 1)
	}
}

// Missed records that the feed begins in the middle of the engine's life. It is incomplete until
// the next Reset or Cleared.
func (f *Feed) Missed() { f.caches.exact.Miss(f.number) }

// Incomplete reports whether the caches lack some of what the feed said.
func (f *Feed) Incomplete() bool { return f.caches.exact.Incomplete(f.number) }

// Blocks returns how many blocks the target holds in a tier, as the feed said.
func (f *Feed) Blocks(t Tier) int64 { return f.caches.exact.Blocks(f.number, t) }

// BlockSizes returns the sizes of the blocks, in tokens, for which prompts should have an
// [Identity]: those of the feeds that count. The caller must not change the list.
func (c *Caches) BlockSizes() []int {
	if sizes := c.feeds.sizes.Load(); sizes != nil {
		return *sizes
	}
	return nil
}

// maxSizes bounds the block sizes: each costs a hash of each prompt.
const maxSizes = 4

// count lists the block sizes in use.
func (q *feeds) count() {
	var sizes []int
	for _, f := range q.numbers {
		if f == nil {
			continue
		}
		info := f.info.Load()
		if info.Knowledge != Approximate && info.BlockTokens > 0 && len(sizes) < maxSizes && !slices.Contains(sizes, info.BlockTokens) {
			sizes = append(sizes, info.BlockTokens)
		}
	}
	q.sizes.Store(&sizes)
}
