// Package approx keeps the cache models: which leading part of a prompt each target's engine
// has in its KV cache. It builds them from the requests that the router has sent, not from
// the engine's events. Every target is a slot, numbered from 0, with an LRU of blocks as
// large as its engine's cache. All slots share one compressed trie, so that one walk
// answers for every slot.
//
// It does not tokenize, hash, score or choose a target. The owner locks: [Index.Match] and
// the methods that only return a number need the read lock, everything else the write lock.
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
// The index stays within a number of bytes. It counts all that it keeps: hashes by the size
// that the allocator gives them, records, tables. A prefix with one holder costs about 133
// bytes and 8 for each block; another holder costs 40 more. A full index evicts what was
// used longest ago on any slot. Records come in pages, so a bound below about 64 KiB keeps
// little or nothing.
//
// # Time
//
// Each call walks and copies its chain, and does a bounded amount of other work, whatever
// the size of the index. It leaves further eviction and moving to later calls and to
// [Index.Step], which the owner calls regularly. Until then, a slot may hold more than its
// capacity, and the index may exceed a lowered bound in bytes.
package approx

import (
	"crypto/rand"
	"encoding/binary"
	"math"
	"unsafe"
)

// firstTouch leaves room for older values of touched: see [Index.Restore].
const firstTouch = 1 << 40

// maxSlots bounds slot numbers: a hold keeps its slot in 16 bits.
const maxSlots = 1 << 16

// Index has the cache models of all slots. Make it with [New]. It is not safe for concurrent
// use, except that Match and the methods that return a number may run at the same time.
type Index struct {
	runs  slab[run, *run]
	holds slab[hold, *hold]
	table table
	slots []slot

	memory    int64  // bound in bytes
	limit     int64  // the bound now: above memory for a while after memory was lowered
	hashBytes int64  // allocated for all runs' hashes
	blocks    int64  // distinct blocks
	clock     uint64 // last value of touched
	oldest    uint64 // least value of touched: see Restore
	random    uint64 // state of the seeds' generator

	left   int    // work that the current call may still do
	worked uint64 // all work ever
}

// run is an edge of the trie: consecutive blocks without a branch in between. Every run has
// a holder of its whole length, and a holder of a run holds all of its parent. A run
// without children is therefore cut as soon as no slot holds its last block, and a run
// without holds has no children.
type run struct {
	hashes     []uint64
	root       uint64
	parent     uint32 // 0 at the top; in a free record, the next free one
	holds      uint32 // first of the holds
	child      uint32 // first of the children; none are listed at the top
	prev, next uint32 // the parent's other children
	weight     int32  // milli-tokens per block
	start      int32  // blocks before this run
	arrivals   uint16 // see Match
	seed       uint16 // random, for the keys of the children: record numbers change
	// count is an engine's count of a prompt that ended past blocks after the run, in
	// tokens; 0 if there is none.
	count   int32
	past    uint16 // in 1/65536
	weighed bool   // the weight follows from an engine's counts
}

// hold says that a slot has the first n blocks of a run. If requests in flight use it, refs
// counts them and n is the whole run. A hold is in one of its slot's two lists: lru,
// ordered by touched, or parked. A parked hold is in use and outside of the order, because
// it is new or because eviction met it.
type hold struct {
	touched      uint64
	run          uint32 // 0 in a free record
	next         uint32 // in the run's list, or the next free record
	newer, older uint32 // in the slot's list
	n            int32
	refs         int32
	slot         uint16
	confirmed    bool // a request that used it succeeded
	parked       bool
}

// slot is one engine's cache. Sums are in milli-tokens.
type slot struct {
	capacity    int64 // 0: none
	used        int64 // of all holds
	inUse       int64 // of holds with refs
	lru, parked list
	declared    bool
	cleared     bool // the engine has lost its cache; the slot is being emptied
}

type list struct{ front, back uint32 } // front is the most recent

func (r *run) link() *uint32  { return &r.parent }
func (r *run) live() bool     { return len(r.hashes) > 0 }
func (h *hold) link() *uint32 { return &h.next }
func (h *hold) live() bool    { return h.run != 0 }

// Ref names what a request in flight uses: see [Index.Acquire]. The zero value names
// nothing.
type Ref struct {
	run  uint32 // the deepest; it keeps its number when split, and pinned runs do not move
	slot uint16
}

// New returns an empty index without slots that keeps at most memory bytes.
func New(memory int64) *Index {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	return &Index{
		memory: memory,
		limit:  memory,
		clock:  firstTouch,
		oldest: firstTouch,
		random: binary.LittleEndian.Uint64(b[16:]),
		table: table{
			// Keyed, so that clients cannot choose colliding prompts.
			k0: binary.LittleEndian.Uint64(b[:]),
			k1: binary.LittleEndian.Uint64(b[8:]),
		},
	}
}

// SetMemory changes the bound in bytes. After a lower bound, the index evicts what was used
// longest ago in steps: see [Index.Step]. Bytes does not grow until it is within the bound.
// What is in use stays until released.
func (x *Index) SetMemory(bytes int64) {
	x.memory = bytes
	x.limit = max(bytes, min(x.limit, x.Bytes()))
	x.begin()
	x.settle(nil)
}

// SetCapacity declares a slot, or changes the capacity of its engine's cache, in tokens; 0
// means as much as memory allows. The index evicts what exceeds a lower capacity: see
// [Index.Step]. What is in use stays until released. Slots are numbers below 65536, and
// should be dense. Others are ignored.
func (x *Index) SetCapacity(slot int, tokens int64) {
	if slot < 0 || slot >= maxSlots {
		return
	}
	x.declare(slot)
	s := &x.slots[slot]
	s.capacity = min(max(tokens, 0), math.MaxInt64/4000) * 1000
	x.begin()
	x.settle(s)
}

// declare grows the slots in small steps: append would double their memory.
func (x *Index) declare(n int) {
	if n >= cap(x.slots) {
		grown := make([]slot, len(x.slots), (n/16+1)*16)
		copy(grown, x.slots)
		x.slots = grown
	}
	if n >= len(x.slots) {
		x.slots = x.slots[:n+1]
	}
	x.slots[n].declared = true
}

// slot returns a declared slot or nil.
func (x *Index) slot(n int) *slot {
	if n < 0 || n >= len(x.slots) || !x.slots[n].declared {
		return nil
	}
	return &x.slots[n]
}

// Used returns how many tokens the slot holds, 0 for an unknown slot.
func (x *Index) Used(slot int) int64 {
	if s := x.slot(slot); s != nil {
		return s.used / 1000
	}
	return 0
}

// InUse returns the tokens that requests in flight use on the slot. Shared tokens count
// once. 0 for an unknown slot.
func (x *Index) InUse(slot int) int64 {
	if s := x.slot(slot); s != nil {
		return s.inUse / 1000
	}
	return 0
}

// Blocks returns the number of distinct blocks (by position and content) that
// any slot holds or uses.
func (x *Index) Blocks() int64 { return x.blocks }

// Bytes returns the size of all that the index keeps, including spare records. It exceeds
// the bound if the slots' own records do. It may also exceed a bound that was lowered,
// until Step has caught up and used blocks are released.
func (x *Index) Bytes() int64 {
	return x.hashBytes + x.runs.bytes() + x.holds.bytes() + x.table.bytes() +
		int64(cap(x.slots))*int64(unsafe.Sizeof(slot{})) + int64(unsafe.Sizeof(Index{}))
}

// Idle reports whether nothing is held or in use on the slot, as after Clear.
func (x *Index) Idle(slot int) bool {
	s := x.slot(slot)
	return s == nil || s.idle()
}

func (s *slot) idle() bool { return s.lru.front == 0 && s.parked.front == 0 }

func (x *Index) seed() uint16 {
	x.random = x.random*6364136223846793005 + 1442695040888963407
	return uint16(x.random >> 48)
}
