package engine

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// changes is what changed in a rank's tiers since the latest batch. nil is that of an
// engine without events. The rank's lock guards it.
//
// A vLLM publishes the changes of a step when that step has ended. What changes while no
// step is under way, a clear, is published with the next step. An SGLang publishes what
// there is after each step and when it is idle.
type changes struct {
	cfg    *Config
	rank   int
	pub    *publisher.Publisher
	events []publisher.Event
	// tree is all blocks that an SGLang had since the latest clear; nil for other flavours.
	tree map[cache.Key]treeBlock
	// above is the parent of the block that was removed last, while that is the latest
	// event.
	above cache.Key
}

// treeBlock is a block in the radix tree of an SGLang.
type treeBlock struct {
	parent cache.Key
	name   cache.Key // without salt and adapter: SGLang leaves them out of the hash
}

// tier listens to one tier of a rank.
type tier struct {
	*changes
	medium string
}

// newChanges returns the changes of a rank. An SGLang begins with a batch that clears.
func newChanges(cfg *Config, rank int, pub *publisher.Publisher) *changes {
	c := &changes{cfg: cfg, rank: rank, pub: pub}
	if cfg.Flavour == SGLang {
		c.tree = make(map[cache.Key]treeBlock)
		c.events = append(c.events, publisher.Event{Kind: publisher.Cleared})
		c.publish()
	}
	return c
}

// newCache returns the cache of a rank, with the tiers of the flavour. Its listener is c.
func (c *changes) newCache(cfg *Config) *cache.Cache {
	if c == nil {
		kv := cache.New(cfg.Blocks, cfg.BlockSize, nil)
		kv.Off = cfg.NoPrefixCache
		return kv
	}
	kv := cache.New(cfg.Blocks, cfg.BlockSize, tier{c, "GPU"})
	kv.Unique = cfg.Flavour == SGLang
	if n := cfg.Events.HostBlocks; n > 0 {
		kv.Host = cache.NewHost(n, tier{c, "CPU_PINNED"})
	}
	return kv
}

// stepEnds publishes what a vLLM's step changed, if one was under way.
func (c *changes) stepEnds(busy bool) {
	if c != nil && busy && c.tree == nil {
		c.publish()
	}
}

// settle publishes what there is, as an SGLang does.
func (c *changes) settle() {
	if c != nil && c.tree != nil {
		c.publish()
	}
}

func (c *changes) publish() {
	if len(c.events) == 0 {
		return
	}
	if c.tree != nil { // they came in the order of their eviction
		for i := range c.events {
			if c.events[i].Kind == publisher.Removed {
				slices.Reverse(c.events[i].Hashes)
			}
		}
	}
	c.pub.Publish(&publisher.Batch{Time: time.Now(), Rank: c.rank, Events: c.events})
	c.events = nil
}

// Stored notes a run of blocks.
func (t tier) Stored(s cache.Stored) {
	e := publisher.Event{
		Kind: publisher.Stored, First: s.First, Tokens: slices.Clone(s.Tokens), BlockSize: t.cfg.BlockSize,
		LoRA: s.Root.LoRA, LoRAID: slices.Index(t.cfg.LoRAs, s.Root.LoRA) + 1, Salt: s.Root.Salt, Session: s.Session, Medium: t.medium,
	}
	for i, k := range s.Keys {
		if t.tree != nil {
			t.grow(s, i)
		}
		e.Hashes = append(e.Hashes, t.hash(k))
	}
	if !s.First {
		e.Parent = t.hash(s.Parent)
	}
	t.events = append(t.events, e)
}

// grow notes block i of a run in the tree.
func (c *changes) grow(s cache.Stored, i int) {
	b := treeBlock{parent: s.Parent, name: s.Keys[i]}
	if i > 0 {
		b.parent = s.Keys[i-1]
	}
	if s.Root.Salt != "" || s.Root.LoRA != "" {
		above := cache.Root{Model: s.Root.Model}.Key()
		if i > 0 || !s.First {
			above = c.tree[b.parent].name
		}
		b.name = cache.Child(above, s.Tokens[i*c.cfg.BlockSize:(i+1)*c.cfg.BlockSize])
	}
	c.tree[s.Keys[i]] = b
}

// Removed notes the end of a block. An SGLang has one event for the blocks of a chain
// that go one after another.
func (t tier) Removed(k cache.Key) {
	h, last := t.hash(k), len(t.events)-1
	if t.tree != nil && t.above == k && last >= 0 && t.events[last].Kind == publisher.Removed && t.events[last].Medium == t.medium {
		t.events[last].Hashes = append(t.events[last].Hashes, h)
	} else {
		t.events = append(t.events, publisher.Event{Kind: publisher.Removed, Hashes: []uint64{h}, Medium: t.medium})
	}
	t.above = t.tree[k].parent
}

// Cleared notes that all tiers are empty.
func (t tier) Cleared() {
	clear(t.tree)
	t.events = append(t.events, publisher.Event{Kind: publisher.Cleared})
	t.settle()
}

// hash returns what events call a block.
func (c *changes) hash(k cache.Key) uint64 {
	if b, ok := c.tree[k]; ok {
		k = b.name
	}
	if seed := c.cfg.Events.HashSeed; seed != 0 {
		return mixed(uint64(k) ^ seed)
	}
	return uint64(k)
}

// mixed returns another number for each number: splitmix64.
func mixed(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
