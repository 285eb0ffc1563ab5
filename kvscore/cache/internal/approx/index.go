// Package approx keeps the approximate cache models: which leading part of a prompt each
// target's engine has in its KV cache. It builds them from the requests that the router has
// sent, not from the engine's events. Every target is a slot, numbered from 0, with an LRU of
// blocks as large as its engine's cache. All slots share one compressed trie, so that one walk
// answers for every slot.
//
// It does not tokenize, hash, score or choose a target. The owner locks: [Index.Match] and the
// methods that only return a number need the read lock, everything else the write lock. Used and
// InUse need none.
//
// # Chains
//
// A prompt is a root and the content hashes of its full blocks in order. The root stands for
// everything that must be equal for two prompts to share blocks: the model, a salt. A hash
// is that of the block alone; the place in the trie stands for the blocks before it. What a
// slot holds of a chain always begins at the first block and has no holes.
//
// # Memory
//
// The index stays within a number of bytes, by an estimate of all that it keeps. A prefix with
// one holder costs about 230 bytes and 8 for each block; another holder costs about 60 more.
// A full index evicts what was used longest ago on any slot.
//
// # Time
//
// Each call walks and copies its chain, and evicts what the chain displaces. A lower bound
// leaves more to evict. Each call does a part of it, and [Index.Step], which the owner calls
// regularly, does the rest. Until then, a slot may hold more than its capacity, and the index may exceed a
// lowered bound in bytes.
package approx

import (
	"math"
	"slices"
	"sync/atomic"
)

// MaxSlots bounds slot numbers: they are below it, and a hold keeps its slot in 16 bits.
const MaxSlots = 1 << 16

// Index has the cache models of all slots. Make it with [New].
type Index struct {
	runs  map[start]*run
	slots []*slot

	memory int64  // bound in bytes
	bytes  int64  // of runs, their hashes and holds, about
	blocks int64  // distinct blocks
	peak   int    // most runs since the map was made
	clock  uint64 // last value of touched
}

// run is an edge of the trie: consecutive blocks without a branch in between. A holder of a run
// holds all of its parent. A run without children is therefore cut as soon as no slot holds its
// last block, and a run without holds has no children.
type run struct {
	hashes []uint64
	root   uint64
	up     *run    // nil at the top
	holds  []*hold // by slot
	start  int32   // blocks before this run
	weight int32   // milli-tokens per block
	// count is an engine's count of a prompt that ended past blocks after the run, in
	// tokens; 0 if there is none.
	count    int32
	past     uint16 // in 1/65536
	arrivals uint16 // see Match
	partial  int32  // holds of a part of the run, and lost ones
	used     int32  // holds with refs
	weighed  bool   // the weight follows from an engine's counts
}

// hold says that a slot has the first n blocks of a run. If requests in flight use it, refs
// counts them and n is the whole run. Holds of a slot are in the order of touched. That of a
// run is touched after those of its children.
type hold struct {
	touched      uint64
	run          *run // nil once the hold is removed
	newer, older *hold
	n            int32
	refs         int32
	age          uint32 // its group: see ages
	slot         uint16
	confirmed    bool // a request that used it succeeded
	lost         bool // the engine has lost its cache since: only requests in flight have it
}

// slot is one engine's cache. Sums are in milli-tokens.
type slot struct {
	capacity    int64        // 0: none
	used        atomic.Int64 // of all holds but lost ones
	inUse       atomic.Int64 // of holds with refs
	lost        int64        // of inUse, that of lost holds
	ages        ages         // of used
	forgets     uint64       // holds that were touched before are to be removed
	front, back *hold        // front is the most recent
	holds       int
	pinned      int // holds with refs
}

// The memory of a run with its entry in the map, and of a hold with its place in the run.
const (
	runBytes  = 96 + 70
	holdBytes = 48 + 12
)

// Ref names what a request in flight uses: see [Index.Acquire]. The zero value names
// nothing.
type Ref struct {
	run  *run // the deepest; it stays the deepest when split
	slot uint16
	last Last
}

// Last says when a slot last used the blocks of a prompt that it held before.
type Last struct {
	Touched uint64 // as Index.Now was then; 0 if it held none
	Newer   int64  // tokens that the slot has used since, each once, about
}

// Last returns when the slot last used what it held of the prompt.
func (r Ref) Last() Last { return r.last }

// Blocks returns the first n blocks of what the request uses, in a list if that has room.
func (r Ref) Blocks(list []uint64, n int) []uint64 {
	list = slices.Grow(list[:0], n)[:n]
	for r := r.run; r != nil; r = r.up {
		copy(list[min(int(r.start), n):], r.hashes)
	}
	return list
}

// Now returns a number that grows with each use of a block on any slot.
func (x *Index) Now() uint64 { return x.clock }

// New returns an empty index without slots that keeps at most memory bytes.
func New(memory int64) *Index {
	return &Index{runs: make(map[start]*run), memory: memory}
}

// SetMemory changes the bound in bytes. After a lower bound, the index evicts what was used
// longest ago in steps: see [Index.Step]. It may track no new blocks until it is within the bound.
// What is in use stays until released.
func (x *Index) SetMemory(bytes int64) {
	x.memory = bytes
	x.settle(nil)
}

// SetCapacity declares a slot and those before it, or changes the capacity of its engine's cache, in
// tokens; 0 means as much as memory allows. The index evicts what exceeds a lower capacity: see
// [Index.Step]. What is in use stays until released.
func (x *Index) SetCapacity(n int, tokens int64) {
	for n >= len(x.slots) {
		x.slots = append(x.slots, new(slot))
	}
	s := x.slots[n]
	s.capacity = min(max(tokens, 0), math.MaxInt64/4000) * 1000
	x.settle(s)
}

// Used returns how many tokens the slot holds.
func (x *Index) Used(slot int) int64 { return x.slots[slot].used.Load() / 1000 }

// IsEmpty returns whether the slot holds nothing.
func (x *Index) IsEmpty(slot int) bool { return x.slots[slot].holds == 0 }

// InUse returns the tokens that requests in flight use on the slot. Shared tokens count once.
func (x *Index) InUse(slot int) int64 { return x.slots[slot].inUse.Load() / 1000 }

// Blocks returns the number of distinct blocks (by position and content) that
// any slot holds or uses.
func (x *Index) Blocks() int64 { return x.blocks }

// Bytes returns about the size of all that the index keeps. It may exceed a bound that was
// lowered, until Step has caught up and used blocks are released.
func (x *Index) Bytes() int64 { return x.bytes }

// start leads to the run that begins with a block: below another one, or at the top.
type start struct {
	up          *run // nil at the top
	root, block uint64
}

func (r *run) begin() start { return start{r.up, r.root, r.hashes[0]} }
