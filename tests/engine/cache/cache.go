// Package cache is the paged KV cache of one simulated engine rank. It knows
// which blocks there are, which prefix each one holds, its references, and what
// is evicted next. It follows vLLM's block manager. It knows no HTTP and no
// time, and is not safe for concurrent use.
//
// A block is in one of three states, and each is in exactly one:
//
//   - empty: nobody holds it and it holds nothing that could be found;
//   - used: at least one request holds it;
//   - cached: nobody holds it, but it holds a full block of some prefix, which
//     the next request with that prefix takes up again.
//
// New blocks are taken from the empty ones, then from the cached ones, least
// recently used first. A request returns its blocks from the tail. A prefix is
// therefore evicted from its end, and the parent of a cached block is cached.
package cache

import (
	"container/list"
	"slices"
)

// Stored is a run of blocks that became findable, each the next one's parent.
type Stored struct {
	Root Root
	// First says that the run starts the prompt; then there is no parent.
	First  bool
	Parent Key
	Keys   []Key
	// The tokens of all blocks of the run.
	Tokens []uint32
	// Session is that of the prompt.
	Session string
}

// slice returns some of a run's blocks.
func (s Stored) slice(from, to int) Stored {
	if from > 0 {
		s.First, s.Parent = false, s.Keys[from-1]
	}
	size := len(s.Tokens) / max(1, len(s.Keys))
	s.Keys, s.Tokens = s.Keys[from:to], s.Tokens[from*size:to*size]
	return s
}

// Listener hears which blocks become findable and which are gone. It must not
// keep the slices that it is given. As with vLLM, a key may be stored again
// while it is there, when two requests computed the same block. It is then
// removed as often.
type Listener interface {
	Stored(s Stored)
	Removed(k Key)
	Cleared()
}

// nobody is the listener of a cache without one.
type nobody struct{}

func (nobody) Stored(Stored) {}
func (nobody) Removed(Key)   {}
func (nobody) Cleared()      {}

// block is a physical block that is used or cached.
type block struct {
	refs  int
	keyed bool // findable as key
	key   Key
	place *list.Element // among the cached ones, while refs is 0
}

// Cache is the blocks of one rank.
type Cache struct {
	// Unique keeps each prefix once: a request that computed a block which is there gives
	// its own block back and holds that one. SGLang's radix tree does so.
	Unique bool
	// Off has no prompt take up what others computed, as in an engine without prefix caching.
	Off bool
	// Host is a slower tier; nil for none. Blocks are copied to it when they become findable,
	// and copied back when a prompt hits them there.
	Host *Host

	size     int
	blocks   int
	used     int              // blocks that requests hold
	byKey    map[Key][]*block // the oldest first
	cached   *list.List       // the least recently used first
	listener Listener
}

// New returns an empty cache with the given number of blocks of size tokens
// each. The listener may be nil.
func New(blocks, size int, l Listener) *Cache {
	if l == nil {
		l = nobody{}
	}
	return &Cache{size: size, blocks: blocks, byKey: make(map[Key][]*block), cached: list.New(), listener: l}
}

// Blocks returns the capacity in blocks.
func (c *Cache) Blocks() int { return c.blocks }

// BlocksFor returns how many blocks so many tokens need.
func (c *Cache) BlocksFor(tokens int) int { return (tokens + c.size - 1) / c.size }

// Hit returns how many leading tokens of a prompt are cached. The last token is
// always computed, and only whole blocks are taken up: of n tokens at most
// floor((n-1)/size)*size.
func (c *Cache) Hit(p *Prompt) int {
	device, host := c.match(p)
	return (device + host) * c.size
}

// match returns how many leading blocks a request takes up, and how many behind them
// it copies back from the slower tier.
func (c *Cache) match(p *Prompt) (device, host int) {
	if c.Off {
		return 0, 0
	}
	return c.held(p.Keys[:max(0, (len(p.Tokens)-1)/c.size)])
}

// held returns how many leading keys are findable, and how many behind them the slower tier has.
func (c *Cache) held(keys []Key) (device, host int) {
	for device < len(keys) && c.byKey[keys[device]] != nil {
		device++
	}
	if c.Host != nil {
		host = c.Host.held(keys[device:])
	}
	return device, host
}

// Clear forgets all cached blocks. It does nothing and returns false while a
// request holds blocks.
func (c *Cache) Clear() bool {
	if c.used > 0 {
		return false
	}
	clear(c.byKey)
	c.cached.Init()
	if c.Host != nil {
		c.Host.clear()
	}
	c.listener.Cleared()
	return true
}

// free returns how many blocks a request can take.
func (c *Cache) free() int { return c.blocks - c.used }

// take takes a free block for a request. If none is empty, it evicts one.
func (c *Cache) take() *block {
	if c.cached.Len() == c.free() {
		c.forget(c.cached.Remove(c.cached.Front()).(*block))
	}
	c.used++
	return &block{refs: 1}
}

// hold adds a reference to the block of a key that is there.
func (c *Cache) hold(k Key) *block {
	b := c.byKey[k][0]
	if b.refs == 0 {
		c.cached.Remove(b.place)
		c.used++
	}
	b.refs++
	return b
}

// release takes a reference away.
func (c *Cache) release(b *block) {
	if b.refs--; b.refs > 0 {
		return
	}
	c.used--
	if b.keyed {
		b.place = c.cached.PushBack(b)
	}
}

// name makes a used block findable as k.
func (c *Cache) name(b *block, k Key) {
	b.keyed, b.key = true, k
	c.byKey[k] = append(c.byKey[k], b)
}

// forget undoes name.
func (c *Cache) forget(b *block) {
	same := slices.DeleteFunc(c.byKey[b.key], func(other *block) bool { return other == b })
	if c.byKey[b.key] = same; len(same) == 0 {
		delete(c.byKey, b.key)
	}
	c.listener.Removed(b.key)
}
