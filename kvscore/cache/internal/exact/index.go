package exact

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Tier is where an engine keeps a block.
type Tier uint8

// The tiers, from the fastest to the slowest.
const (
	Device Tier = iota
	Host
	Disk
	// Shared is a store that several targets reach. A block that one target reports there is
	// there for all targets that have ever reported one. See [Index.Remove].
	Shared
)

// Tiers is the number of tiers.
const Tiers = 4

var tierNames = [Tiers]string{"device", "host", "disk", "shared"}

// String returns the tier's name, "unknown" for a value that is no tier.
func (t Tier) String() string {
	if t >= Tiers {
		return "unknown"
	}
	return tierNames[t]
}

// MaxTargets bounds the numbers of targets: they are below it.
const MaxTargets = 4096

// Stored is an event: a target's engine has stored consecutive blocks of a chain in a tier.
type Stored struct {
	Target int
	Tier   Tier
	// Root stands for what must be equal for two prompts to share blocks: adapter, salt and
	// block size. It does not include the model, because a target serves only one. It is
	// required without a parent. With a parent, 0 means that the event does not show it, and
	// any other value must be the root of the parent's chain.
	Root uint64
	// Parent is the engine's name of the block before the first, if HasParent.
	Parent    uint64
	HasParent bool
	// Names are the engine's names of the blocks, in order.
	Names []uint64
	// Blocks are the content hashes. If nil, the index must know the blocks by these names
	// from another tier or target.
	Blocks []uint64
}

// Outcome says whether the index recorded all of an event.
type Outcome uint8

const (
	// OK: the index recorded all blocks.
	OK Outcome = iota
	// UnknownParent: no target holds a block with the parent's name, or only others do and its
	// root is not that of the event.
	UnknownParent
	// UnknownName: an event without content has a name that leads to no held block. The index
	// recorded the other blocks.
	UnknownName
	// Contradiction: a name leads to another block that the target holds, or the root is not
	// that of the parent. The index recorded the blocks before.
	Contradiction
	// NoRoom: the blocks do not fit into the memory.
	NoRoom
	// Invalid: the event has an impossible target or tier, or names and blocks differ in
	// number.
	Invalid
)

// Index knows which blocks each target holds. Make it with [New]. All methods are safe for
// concurrent use.
type Index struct {
	// Readers use these.
	kids    atomic.Pointer[kids]
	columns atomic.Pointer[columns]
	slower  atomic.Bool // a tier below the device has been used

	mu          sync.Mutex // guards what follows
	names       names
	runs        []*run // by id
	freeRuns    []uint32
	owners      []owner // by target
	dirty       set     // columns of cleared targets that sets may still have
	freeColumns []int   // those that no set has
	memory      budget
	sweep       sweep
	work        scratch
}

// owner is what only a writer needs of a target.
type owner struct {
	column     int // -1 without blocks
	blocks     [Tiers]int64
	repeats    map[repeat]int32 // how often a block was stored again
	incomplete bool
	ambiguous  bool // a name of this target has led to another block
}

// repeat is a block that a target has stored more than once: vLLM reports each physical block, and
// later as many removals.
type repeat struct {
	at   place
	tier Tier
}

// budget is the memory of the index, in bytes.
type budget struct {
	bound   int64
	runs    int64 // runs, their views, hashes and names
	repeats int64 // of all targets
}

// scratch is what an event needs for as long as it is worked on.
type scratch struct {
	segments []segment
	again    []span // blocks of this event that the target held already
	repeated int    // their number
	hashes   []uint64
	touched  uint64 // see hashes
	near     cursor // the last removal
	stored   cursor // the end of the last event's chain
	// Blocks [from, to) of run are being stored: they count as held.
	run      *run
	from, to int32
}

// span is a number of consecutive places.
type span struct {
	at place
	n  int32
}

// New returns an empty index that keeps at most memory bytes.
func New(memory int64) *Index {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	x := &Index{}
	x.memory.bound = memory
	x.names.k0, x.names.k1 = binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])|1
	x.names.aliases = make(map[uint64]place)
	x.kids.Store(&kids{cells: make([]cell, fewCells)})
	x.columns.Store(&columns{})
	x.runs = []*run{nil} // no place is 0
	return x
}

// SetMemory changes the bound in bytes. Below what the index keeps now, [Index.Step] evicts
// the rest.
func (x *Index) SetMemory(bytes int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.memory.bound = bytes
}

// Bytes returns the size of all that the index keeps.
func (x *Index) Bytes() int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.bytes()
}

func (x *Index) bytes() int64 {
	return int64(unsafe.Sizeof(*x)) + x.memory.runs + x.memory.repeats + x.kids.Load().bytes() +
		x.names.table.bytes() + int64(len(x.names.aliases))*aliasBytes +
		int64(cap(x.owners))*int64(unsafe.Sizeof(owner{}))
}

// Blocks returns how many blocks the target holds in the tier. It returns 0 for an unknown
// target.
func (x *Index) Blocks(target int, t Tier) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	if target < 0 || target >= len(x.owners) || t >= Tiers {
		return 0
	}
	return x.owners[target].blocks[t]
}

// Distinct returns the number of blocks that any target holds. After [Index.Clear], it
// includes the target's blocks until [Index.Step] has reclaimed them.
func (x *Index) Distinct() int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return int64(x.names.table.count)
}

// Incomplete reports whether the index lacks blocks that the target holds: since the
// target's last Clear, it evicted some for memory, or refused an event.
func (x *Index) Incomplete(target int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return target >= 0 && target < len(x.owners) && x.owners[target].incomplete
}

// Miss records that events of a target are missing, as before the first that the caller got. The
// target is incomplete until its next Clear.
func (x *Index) Miss(target int) {
	if target < 0 || target >= MaxTargets {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.owner(target).incomplete = true
}

// owner returns the writer's part of a target.
func (x *Index) owner(target int) *owner {
	if target >= len(x.owners) {
		grown := make([]owner, target+1, (target/16+1)*16)
		for i := range grown {
			grown[i].column = -1
		}
		copy(grown, x.owners)
		x.owners = grown
	}
	return &x.owners[target]
}
