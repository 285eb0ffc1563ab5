package exact

import (
	"hash/maphash"
	"sync"
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

// String returns the tier's name.
func (t Tier) String() string { return tierNames[t] }

// MaxTargets bounds the numbers of targets: they are below it.
const MaxTargets = 4096

// Index knows which blocks each target holds. Make it with [New]. All methods are safe for
// concurrent use.
type Index struct {
	mu       sync.RWMutex // guards what follows
	runs     []*run       // by id; 0 is none
	free     []uint32     // ids without a run
	starts   map[start]*run
	most     int // of starts since the map was made
	names    names
	aliases  map[place][]uint64 // names of a block beside its first
	sets     sets
	owners   []owner // by target
	sharing  mask    // targets that have reported a block in the shared tier
	slower   bool    // a tier below the device has been used
	bound    int64   // of the memory, in bytes
	bytes    counts
	hand     int     // the last run that eviction looked at
	dirty    bool    // a target was cleared since the last round of Step began
	sweep    int     // the last run of that round, 0 if there is none
	repeated []place // blocks of the current event that the target held already
}

// run is a piece of a chain: consecutive blocks. Other runs continue it after any of its blocks, so
// it is never divided.
type run struct {
	id     uint32
	hot    bool // an event has touched it since the last round of eviction
	root   uint64
	up     place    // the block before the first, 0 at the top
	hashes []uint64 // of the blocks' content
	blocks []block
}

// runSize is the greatest number of blocks in a run.
const (
	offsetBits = 9
	runSize    = 1 << offsetBits
)

type block struct {
	name uint64 // the engine's, if set is not 0
	set  uint32 // its holders; 0 if none has held it since it lost its names
	kids uint32 // runs that continue the chain after it
}

// place is a number for a block: its run and its offset there.
type place uint64

// bytes returns the memory of a run's blocks.
func (r *run) bytes() int64 { return int64(cap(r.blocks))*blockBytes + int64(cap(r.hashes))*hashBytes }

func (r *run) at(i int) place { return place(r.id)<<offsetBits | place(i) } //nolint:gosec // below runSize

func (p place) offset() int { return int(p % runSize) } //nolint:gosec // below runSize

func (x *Index) run(p place) *run { return x.runs[p>>offsetBits] }

func (x *Index) block(p place) *block { return &x.run(p).blocks[p.offset()] }

// start leads to the run that begins with a block: after another block, or at the top.
type start struct {
	root uint64
	up   place
	hash uint64
}

func (r *run) start() start { return start{r.root, r.up, r.hashes[0]} }

// owner is what the index keeps of a target.
type owner struct {
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

// counts are bytes.
type counts struct {
	blocks  int64 // of all runs
	repeats int64 // of all targets
	aliases int64
}

const (
	blockBytes  = int64(unsafe.Sizeof(block{}))
	hashBytes   = 8
	runBytes    = 96 // with the rest of the size classes of its lists
	startBytes  = 64 // in the map
	repeatBytes = 32
	aliasBytes  = 64
)

// New returns an empty index that keeps at most memory bytes.
func New(memory int64) *Index {
	x := &Index{bound: memory, names: names{seed: maphash.MakeSeed()}}
	x.reset()
	return x
}

// reset gives back the memory of an index without runs.
func (x *Index) reset() {
	x.runs, x.free = []*run{nil}, nil // no place is 0
	x.sets.reset()
	x.starts, x.most, x.aliases = make(map[start]*run), 0, make(map[place][]uint64)
}

// SetMemory changes the bound in bytes. Below what the index keeps now, [Index.Step] evicts
// the rest.
func (x *Index) SetMemory(bytes int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.bound = bytes
}

// Bytes returns the size of all that the index keeps.
func (x *Index) Bytes() int64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.size()
}

func (x *Index) size() int64 {
	return int64(unsafe.Sizeof(*x)) + int64(len(x.starts))*runBytes + int64(x.most)*startBytes + int64(cap(x.runs))*8 + x.bytes.blocks + x.bytes.repeats + x.bytes.aliases +
		x.names.bytes + x.sets.bytes + int64(cap(x.owners))*int64(unsafe.Sizeof(owner{}))
}

// Blocks returns how many blocks the target holds in the tier.
func (x *Index) Blocks(target int, t Tier) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.owner(target).blocks[t]
}

// Incomplete reports whether the index lacks blocks that the target holds: since the
// target's last Clear, it evicted some for memory, or refused an event.
func (x *Index) Incomplete(target int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.owner(target).incomplete
}

// Miss records that events of a target are missing, as before the first that the caller got. The
// target is incomplete until its next Clear.
func (x *Index) Miss(target int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.owner(target).incomplete = true
}

func (x *Index) owner(target int) *owner {
	for target >= len(x.owners) {
		x.owners = append(x.owners, owner{})
	}
	return &x.owners[target]
}
