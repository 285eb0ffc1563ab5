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

// Stored is a run of blocks that became findable, each the next one's parent.
type Stored struct {
	Root Root
	// First says that the run starts the prompt; then there is no parent.
	First  bool
	Parent Key
	Keys   []Key
	// The tokens of all blocks of the run.
	Tokens []uint32
	// Media are those of each block; nil if there are none.
	Media [][]BlockMedia
	// Session is that of the prompt.
	Session string
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

// none ends a linked list of blocks.
const none = int32(-1)

// block is one physical block.
type block struct {
	refs  int
	keyed bool
	key   Key
	// The neighbours in the list of free blocks; only while refs is 0.
	prev, next int32
	// The ring of the blocks with the same key; only while keyed.
	samePrev, sameNext int32
}

// Cache is the blocks of one rank.
type Cache struct {
	size   int
	blocks []block
	byKey  map[Key]int32 // the oldest block with that key
	// The free blocks: the empty ones, then the cached ones, least recently used
	// first.
	head, tail int32
	used       int // blocks that requests hold
	version    uint64
	listener   Listener
	unique     bool
	off        bool
	host       *Host // nil: none
}

// New returns an empty cache with the given number of blocks of size tokens
// each. The listener may be nil.
func New(blocks, size int, l Listener) *Cache {
	c := &Cache{
		size: size, blocks: make([]block, blocks), byKey: make(map[Key]int32),
		head: none, tail: none, listener: l,
	}
	for i := range c.blocks {
		c.pushBack(int32(i))
	}
	return c
}

// Unique keeps each prefix once: a request that computed a block which is there gives
// its own block back and holds that one. SGLang's radix tree does so.
func (c *Cache) Unique() { c.unique = true }

// Off has no prompt take up what others computed, as in an engine without prefix caching.
func (c *Cache) Off() { c.off = true }

// AddHost gives the cache a slower tier. Blocks are copied to it when they become
// findable, and copied back when a prompt hits them there.
func (c *Cache) AddHost(h *Host) { c.host = h }

// Blocks returns the capacity in blocks.
func (c *Cache) Blocks() int { return len(c.blocks) }

// BlockSize returns the tokens in a block.
func (c *Cache) BlockSize() int { return c.size }

// Holds returns how many leading full blocks of a prompt the cache holds, and how many
// behind them the slower tier holds. Unlike in Hit, the last token counts.
func (c *Cache) Holds(p *Prompt) (device, host int) {
	device = c.held(p.Keys)
	if c.host != nil {
		host = c.host.held(p.Keys[device:])
	}
	return device, host
}

// Version changes whenever Open may have another result than before.
func (c *Cache) Version() uint64 { return c.version }

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
	if c.off {
		return 0, 0
	}
	keys := p.Keys[:max(0, (len(p.Tokens)-1)/c.size)]
	device = c.held(keys)
	if c.host != nil {
		host = c.host.held(keys[device:])
	}
	return device, host
}

// held returns how many leading keys are findable.
func (c *Cache) held(keys []Key) int {
	for i, k := range keys {
		if _, ok := c.byKey[k]; !ok {
			return i
		}
	}
	return len(keys)
}

// Clear forgets all cached blocks. It does nothing and returns false while a
// request holds blocks.
func (c *Cache) Clear() bool {
	if c.used > 0 {
		return false
	}
	for i := range c.blocks {
		c.blocks[i].keyed = false
	}
	clear(c.byKey)
	if c.host != nil {
		c.host.clear()
	}
	c.version++
	if c.listener != nil {
		c.listener.Cleared()
	}
	return true
}

// take takes the next free block for a request, evicting what it holds.
func (c *Cache) take() int32 {
	i := c.head
	b := &c.blocks[i]
	c.unlink(i)
	if b.keyed {
		c.forget(i)
	}
	c.used++
	b.refs = 1
	return i
}

// hold adds a reference to the block of a key that is there.
func (c *Cache) hold(k Key) int32 {
	i := c.byKey[k]
	b := &c.blocks[i]
	if b.refs == 0 {
		c.unlink(i)
		c.used++
	}
	b.refs++
	return i
}

// release takes a reference away.
func (c *Cache) release(i int32) {
	b := &c.blocks[i]
	if b.refs--; b.refs > 0 {
		return
	}
	c.used--
	if b.keyed {
		c.pushBack(i)
	} else {
		c.pushFront(i)
	}
}

// name makes a used block findable as k.
func (c *Cache) name(i int32, k Key) {
	b := &c.blocks[i]
	b.keyed, b.key = true, k
	first, ok := c.byKey[k]
	if !ok {
		b.samePrev, b.sameNext = i, i
		c.byKey[k] = i
		return
	}
	last := c.blocks[first].samePrev
	b.samePrev, b.sameNext = last, first
	c.blocks[last].sameNext, c.blocks[first].samePrev = i, i
}

// forget undoes name.
func (c *Cache) forget(i int32) {
	b := &c.blocks[i]
	if b.sameNext == i {
		delete(c.byKey, b.key)
	} else {
		c.blocks[b.samePrev].sameNext, c.blocks[b.sameNext].samePrev = b.sameNext, b.samePrev
		if c.byKey[b.key] == i {
			c.byKey[b.key] = b.sameNext
		}
	}
	b.keyed = false
	if c.listener != nil {
		c.listener.Removed(b.key)
	}
}

func (c *Cache) pushBack(i int32) {
	b := &c.blocks[i]
	b.prev, b.next = c.tail, none
	if c.tail == none {
		c.head = i
	} else {
		c.blocks[c.tail].next = i
	}
	c.tail = i
}

func (c *Cache) pushFront(i int32) {
	b := &c.blocks[i]
	b.prev, b.next = none, c.head
	if c.head == none {
		c.tail = i
	} else {
		c.blocks[c.head].prev = i
	}
	c.head = i
}

func (c *Cache) unlink(i int32) {
	b := &c.blocks[i]
	if b.prev == none {
		c.head = b.next
	} else {
		c.blocks[b.prev].next = b.next
	}
	if b.next == none {
		c.tail = b.prev
	} else {
		c.blocks[b.next].prev = b.prev
	}
}
