package engine

import (
	"maps"
	"slices"
)

// Cache is the KV memory of an engine: blocks by content. Blocks that no request
// uses stay in least-recently-used order until their room is needed.
//
// A block's hash stands for its whole prefix. What the cache holds is closed under
// prefixes: it never holds a block without those before it. That follows from the
// order alone, as requests use whole prefixes and give them back tail first.
type Cache struct {
	capacity int // blocks
	at       map[uint64]int32
	nodes    []node // the first is the ring of unused blocks, oldest first
	spare    []int32
	unused   int // blocks that are held and that no request uses
	used     int // blocks that requests use, those without a hash included
	changes  int // how often blocks were reserved or released
	found    []int32
	hear     Listener // nil: none
	job      int      // whose blocks are reserved or released, for the listener
}

// Listener hears what becomes of a cache's blocks, as the subscriber of an engine's KV events
// does.
type Listener interface {
	// Stored is called with blocks that follow each other, and the one before them unless
	// they begin a prompt.
	// job is the number of the job that they are of.
	Stored(job int, parent uint64, hasParent bool, blocks []uint64)
	Removed(block uint64)
}

// Listen sets the listener. The cache must be empty.
func (c *Cache) Listen(l Listener) { c.hear = l }

// tell tells the listener of the blocks of a chain from a position on.
func (c *Cache) tell(chain []uint64, from int) {
	if c.hear == nil || from == len(chain) {
		return
	}
	parent := uint64(0)
	if from > 0 {
		parent = chain[from-1]
	}
	c.hear.Stored(c.job, parent, from > 0, chain[from:])
}

type node struct {
	hash       uint64
	prev, next int32
	refs       int32
}

// NewCache returns an empty cache for so many blocks.
func NewCache(capacity int) *Cache {
	return &Cache{capacity: capacity, at: make(map[uint64]int32), nodes: make([]node, 1)}
}

func (c *Cache) clone() *Cache {
	d := *c
	d.at, d.nodes, d.spare, d.found = maps.Clone(c.at), slices.Clone(c.nodes), slices.Clone(c.spare), nil
	return &d
}

// Held returns how many leading blocks of a chain the cache holds.
func (c *Cache) Held(chain []uint64) int {
	for i, h := range chain {
		if _, ok := c.at[h]; !ok {
			return i
		}
	}
	return len(chain)
}

// Usage returns the share of the cache that requests use.
func (c *Cache) Usage() float64 { return float64(c.used) / float64(c.capacity) }

// Reserve takes so many blocks in all for a request, the blocks of its prompt among
// them. It returns how many leading ones the cache held, or false if there is
// no room. Other requests may share the prompt's blocks from now on.
func (c *Cache) Reserve(chain []uint64, total int) (held int, ok bool) {
	found, revived := c.found[:0], 0
	for _, h := range chain {
		i, ok := c.at[h]
		if !ok {
			break
		}
		if c.nodes[i].refs == 0 {
			revived++
		}
		found = append(found, i)
	}
	c.found, held = found, len(found)
	if c.used+revived+total-held > c.capacity {
		return held, false
	}
	c.changes++
	for _, i := range found {
		if c.nodes[i].refs == 0 {
			c.unlink(i)
			c.unused--
			c.used++
		}
		c.nodes[i].refs++
	}
	c.evict(total - held)
	for _, h := range chain[held:] {
		i := c.add(h)
		c.nodes[i].refs = 1
	}
	c.used += total - held
	c.tell(chain, held)
	return held, true
}

// Grow takes one more block for a request. It returns false if there is no room.
func (c *Cache) Grow() bool {
	if c.used == c.capacity {
		return false
	}
	c.evict(1)
	c.used++
	return true
}

// Release gives back what Reserve took. The prompt's blocks stay, and the
// answer's blocks that follow them stay, too. Both become the most recently
// used.
func (c *Cache) Release(chain, answer []uint64, total int) {
	c.changes++
	c.used -= total - len(chain)
	for _, h := range slices.Backward(answer) {
		c.push(c.add(h))
	}
	if c.hear != nil {
		c.tell(slices.Concat(chain, answer), len(chain))
	}
	for _, h := range slices.Backward(chain) {
		i := c.at[h]
		if c.nodes[i].refs--; c.nodes[i].refs == 0 {
			c.used--
			c.push(i)
		}
	}
}

// evict drops the oldest unused blocks until there is room for so many more.
func (c *Cache) evict(more int) {
	for c.used+c.unused+more > c.capacity {
		i := c.nodes[0].next
		c.unlink(i)
		delete(c.at, c.nodes[i].hash)
		if c.hear != nil {
			c.hear.Removed(c.nodes[i].hash)
		}
		c.spare = append(c.spare, i)
		c.unused--
	}
}

func (c *Cache) add(hash uint64) int32 {
	var i int32
	if n := len(c.spare); n > 0 {
		i, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		i = int32(len(c.nodes))
		c.nodes = append(c.nodes, node{})
	}
	c.nodes[i] = node{hash: hash}
	c.at[hash] = i
	return i
}

// push makes a block the most recently used of those that no request uses.
func (c *Cache) push(i int32) {
	last := c.nodes[0].prev
	c.nodes[i].prev, c.nodes[i].next = last, 0
	c.nodes[last].next, c.nodes[0].prev = i, i
	c.unused++
}

func (c *Cache) unlink(i int32) {
	n := &c.nodes[i]
	c.nodes[n.prev].next, c.nodes[n.next].prev = n.next, n.prev
}
