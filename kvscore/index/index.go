// Package index remembers which leading part of a prompt each target's engine
// has in its KV cache, so that a router can send a request where most of it is
// computed already. It is a mirror built from what the router itself sent, not
// from what the engine says: every target (a slot, numbered from 0) has an LRU
// of blocks as large as its engine's cache, and all of them share one
// compressed trie, so that one walk answers for every slot.
//
// It does not tokenize, hash or score, it does not choose a target, it hears no
// cache events from engines, and it does not lock: the owner does. [Index.Match]
// changes nothing, so a read lock is enough for it and for the methods that
// only report a number; everything else needs the write lock.
//
// # Chains
//
// A prompt is a root (whatever must be equal for two prompts to share anything:
// the model, a salt) and the content hashes of its full blocks in order. They
// are hashes of the block alone; the place in the trie stands for what comes
// before it. A slot's residency is closed under prefixes: what it holds of a
// chain always begins at the first block and has no holes.
//
// # Memory
//
// The index stays within a number of bytes, counting all that it keeps: hashes
// by the size the allocator gives them, records, tables. A prefix with one
// holder costs about 133 bytes and 8 for each block, another holder of it 40
// more. When full, it forgets what was used longest ago on any slot. Records
// come in pages, so a bound below about 64 KiB keeps little or nothing.
//
// # Time
//
// No call does more than a bounded amount of work, whatever the size of the
// index, but for walking and copying the chain that it is given: what is to be
// forgotten or moved beyond that is left to later calls, and to [Index.Step],
// which the owner calls now and then. Until then, a slot may hold more than its
// capacity, and after the bound in bytes was lowered the index is larger.
package index

import (
	"crypto/rand"
	"encoding/binary"
	"math"
	"unsafe"
)

// maxSlots bounds slot numbers: a hold keeps its slot in 16 bits.
const maxSlots = 1 << 16

// Index is the mirror of all slots' prefix caches. Make it with [New]. It is
// not safe for concurrent use, except that any number of calls of Match and of
// the reporting methods may run at the same time.
type Index struct {
	runs  slab[run, *run]
	holds slab[hold, *hold]
	table table
	slots []slot

	memory    int64  // bound in bytes
	limit     int64  // the bound now: above memory while that was lowered
	hashBytes int64  // allocated for all runs' hashes
	blocks    int64  // distinct blocks
	clock     uint64 // last touched number given out
	random    uint64 // state of the seeds' generator

	left   int    // work that the call may still do
	worked uint64 // all work ever
}

// run is an edge of the trie: blocks that follow each other with no branch in
// between. Every run has a holder of its whole length, and whoever holds a run
// holds all of its parent; so a run without children is cut as soon as nobody
// holds its last block, and a run without holds has no children.
type run struct {
	hashes     []uint64
	root       uint64
	parent     uint32 // 0 at the top; the next free record when this one is free
	holds      uint32 // first of the holds
	child      uint32 // first of the children; none are listed at the top
	prev, next uint32 // the parent's other children
	weight     int32  // milli-tokens per block
	start      int32  // blocks before this run
	arrivals   uint16 // see Match
	seed       uint16 // random, for the keys of the children, as numbers change
	// count is the length in tokens of a prompt that ended past blocks behind the
	// run, as an engine counted it; 0 if there was none.
	count   int32
	past    uint16 // in 1/65536
	weighed bool   // the weight follows from an engine's counts
}

// hold says that a slot has the first n blocks of a run. One with refs counts
// for requests in flight; then n is the whole run. It lies in one of its slot's
// two lists: lru, ordered by touched, or parked: in use and not in the order,
// because it is new or because eviction met it at the end of the order.
type hold struct {
	touched      uint64
	run          uint32 // 0 when the record is free
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
	inUseBlocks int64
	lru, parked list
	declared    bool
	cleared     bool // the engine has nothing of it, it is to be emptied
}

type list struct{ front, back uint32 } // front is the most recent

func (r *run) link() *uint32  { return &r.parent }
func (r *run) live() bool     { return len(r.hashes) > 0 }
func (h *hold) link() *uint32 { return &h.next }
func (h *hold) live() bool    { return h.run != 0 }

// Ref is what a request in flight keeps: see [Index.Acquire]. The zero value
// stands for nothing.
type Ref struct {
	run  uint32 // the deepest; splitting leaves it its number, and pinned runs do not move
	slot uint16
}

// New returns an empty index without slots that keeps at most memory bytes.
func New(memory int64) *Index {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	return &Index{
		memory: memory,
		limit:  memory,
		random: binary.LittleEndian.Uint64(b[16:]),
		table: table{
			// Keyed, so that nobody can choose prompts that collide.
			k0: binary.LittleEndian.Uint64(b[:]),
			k1: binary.LittleEndian.Uint64(b[8:]),
		},
	}
}

// SetMemory changes the bound in bytes. When it is lower than before, what was
// used longest ago is forgotten, little by little: Bytes does not grow until it
// is within the bound, see [Index.Step]. What is in use stays until released.
func (x *Index) SetMemory(bytes int64) {
	x.memory = bytes
	x.limit = max(bytes, min(x.limit, x.Bytes()))
	x.begin()
	x.settle(nil)
}

// SetCapacity declares a slot, or changes how many tokens its engine's cache
// has room for; 0 means as many as memory allows. What is beyond a lower
// capacity is forgotten, see [Index.Step]; what is in use stays until released.
// Slots are numbers below 65536, and should be dense; others are ignored.
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

// declare grows the slots by little: append would double what is accounted for.
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

// InUse returns the tokens that requests in flight use on the slot; those that
// several share count once. 0 for an unknown slot.
func (x *Index) InUse(slot int) int64 {
	if s := x.slot(slot); s != nil {
		return s.inUse / 1000
	}
	return 0
}

// InUseBlocks is InUse in blocks.
func (x *Index) InUseBlocks(slot int) int64 {
	if s := x.slot(slot); s != nil {
		return s.inUseBlocks
	}
	return 0
}

// Blocks returns the number of distinct blocks (by position and content) that
// any slot holds or uses.
func (x *Index) Blocks() int64 { return x.blocks }

// Bytes returns the size of all that the index keeps, spare records included.
// It exceeds the bound only after that was lowered, until Step has caught up
// and what is in use is released, or where the slots' own records do.
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
