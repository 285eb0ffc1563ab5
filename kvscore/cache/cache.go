// Package cache knows which leading part of a prompt each target holds in its KV cache. It
// alone knows that there are two indexes:
//
//   - The approximate one is made of the router's own requests. Each target is an LRU of
//     blocks as large as its engine's cache.
//   - The exact one is made of the engines' KV events: see [Feed].
//
// Events come late. What requests compute now, or have computed a moment ago, is therefore known from
// the requests.
//
// It does not know loads, and chooses no target. It uses neither Caddy nor HTTP. The caller
// passes the time.
package cache

import (
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/exact"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/textmap"
)

// Target is one data-parallel rank of one worker. The router selects, binds, scores and
// indexes targets. A worker without data parallelism has only rank 0.
type Target struct {
	// Worker is the worker's id, configured or derived from its address.
	Worker uint64 `json:"worker" cbor:"1,keyasint,omitempty"`
	// Rank is the data-parallel rank inside the worker.
	Rank uint32 `json:"dp_rank" cbor:"2,keyasint,omitempty"`
}

// String returns worker/rank, both in decimal.
func (t Target) String() string {
	return strconv.FormatUint(t.Worker, 10) + "/" + strconv.FormatUint(uint64(t.Rank), 10)
}

// Less orders targets.
func (t Target) Less(o Target) bool {
	return t.Worker < o.Worker || t.Worker == o.Worker && t.Rank < o.Rank
}

// Kinds is the number of kinds of content blocks. The low bits of the hash of a block of text
// are its kind: see [KindMask].
const (
	Kinds    = approx.Kinds
	KindMask = approx.KindMask
)

// Weights says how many tokens a block stands for, in milli-tokens.
type Weights = approx.Weights

// Same returns equal weights for all blocks, in milli-tokens.
func Same(milliTokens int64) Weights { return approx.Same(milliTokens) }

// Caches are the cache models of all targets. Make them with [New].
//
// The owner serialises Open, Apply, Book, and the methods of [Slot] and [Ticket] but Lose. All others
// are safe for concurrent use, also beside those.
type Caches struct {
	exact   *exact.Index // has locks of its own, as has the learner
	learner learner
	named   named

	mu        sync.RWMutex // guards what follows; a reader of prompts needs the read lock
	blockSize int          // tokens in one KV block
	sent      *approx.Index
	slots     []*Slot // by number in sent; that of an empty closed one is free
	feeds     feeds
	// computed has what targets with feeds have computed of token ids in the last second.
	computed *approx.Index
	late     []late   // by time, about
	memory   []uint64 // for blocks
}

// computedMemory bounds the memory of what was computed in the last second, in bytes.
const computedMemory = 64 << 20

// late is a prompt of which events may be missing for a while.
type late struct {
	ref   approx.Ref
	until time.Time
}

// New returns caches without targets. memory bounds each of the indexes, in bytes. blockSize is the
// number of tokens in one KV block.
func New(memory int64, blockSize int) *Caches {
	x := exact.New(memory)
	return &Caches{
		blockSize: blockSize, exact: x, sent: approx.New(memory), learner: learner{exact: x, texts: textmap.New(memory)},
		feeds: feeds{of: make(map[Target]*Feed)}, computed: approx.New(computedMemory),
	}
}

// Apply changes what New was given. It removes only what no longer fits, in steps:
// see [Caches.Step].
func (c *Caches) Apply(memory int64, blockSize int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blockSize = blockSize
	c.sent.SetMemory(memory)
	c.exact.SetMemory(memory)
	c.learner.texts.SetMemory(memory)
}

// Step does a part of the work that a lower memory or capacity, or a lost cache, leaves. work is
// the number of records to visit; a thousand take about 0.1 ms. It returns whether there is
// more. The owner calls it regularly.
func (c *Caches) Step(work int) (more bool) {
	if c.exact.Step(work) || c.learner.texts.Step(work) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent.Step(work)
}

// Expire ends what waits for events, if its time is over.
func (c *Caches) Expire(now time.Time) {
	c.learner.tell(now)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell(now)
}

// tell forgets what was computed long ago. The lock is held.
func (c *Caches) tell(now time.Time) {
	n := 0
	for ; n < len(c.late) && !c.late[n].until.After(now); n++ {
		c.computed.Release(c.late[n].ref, false)
	}
	c.late = slices.Delete(c.late, 0, n)
}

// awaitEvents makes the blocks of a prompt and its answer, which were computed at a time, count until their
// events should have come. Without an answer, those of the prompt count. The lock is held.
func (c *Caches) awaitEvents(at time.Time, t *Ticket, answer []uint64) {
	chain := t.chain
	if chain.Blocks = answer; answer == nil {
		c.memory = t.ref.Blocks(c.memory, t.tracked)
		chain.Blocks = c.memory
	}
	if ref, n := c.computed.Acquire(t.slot.number, &chain, -1); n > 0 {
		c.late = append(c.late, late{ref, at.Add(eventsLate)})
	}
}

// Size is the size of the indexes, in bytes and blocks.
type Size struct {
	IndexBytes  int64 `json:"index_bytes"`
	IndexBlocks int64 `json:"index_blocks"`
	ExactBytes  int64 `json:"exact_index_bytes"`
	// TextBytes is the size of the map of texts to token blocks.
	TextBytes int64 `json:"text_map_bytes"`
	Lessons   `json:"learned_texts"`
}

// Size returns the size of the indexes.
func (c *Caches) Size() Size {
	lessons, texts := c.learner.size()
	c.mu.RLock()
	defer c.mu.RUnlock()
	return Size{
		Lessons: lessons, TextBytes: texts,
		IndexBytes: c.sent.Bytes(), IndexBlocks: c.sent.Blocks(),
		ExactBytes: c.exact.Bytes() + c.computed.Bytes(),
	}
}
