package exact

// A slot of the table has the hash of a name and a place. 0 is a free slot.
const (
	hashBits  = 30
	refBits   = 34
	refMask   = 1<<refBits - 1
	minSlots  = 16
	shardBits = 8
)

// table is a hash table of 8-byte slots, in shards by the last bits of the hash, that each use
// linear probing. It needs no names. Go's map takes 36 bytes for a name and a place, and double
// the time.
//
// The slots of a shard are in the order of their hashes, with free ones in between. A search
// for an unknown name therefore ends early, and growth reads and writes one slot after the
// other.
type table struct {
	shards [1 << shardBits]shard
	count  int
	slots  int
}

type shard struct {
	slots []uint64 // the last is always free
	count int
}

func (t *table) bytes() int64 { return int64(t.slots) * 8 }

// of returns the shard of a hash, and the hash there.
func (t *table) of(hash uint64) (*shard, uint32) {
	return &t.shards[hash&(1<<shardBits-1)], uint32(hash >> (64 - hashBits))
}

// homes returns how many slots are a home. Those after them take what is moved over the end:
// one that stays free, one at least, and more in a larger shard.
func homes(slots int) uint64 { return uint64(slots - slots/64 - 2) }

func homeOf(hash uint32, homes uint64) int { return int(uint64(hash) * homes >> hashBits) }

// search returns the first slot of the hash, or the place for one.
func (b *shard) search(hash uint32) int {
	k := homeOf(hash, homes(len(b.slots)))
	for least := uint64(hash) << refBits; b.slots[k]-1 < least; { // a free slot less 1 is large
		k++
	}
	return k
}

// has reports whether slot k has the hash. No slot has the reference 0.
func (b *shard) has(k int, hash uint32) bool {
	return b.slots[k]-uint64(hash)<<refBits-1 < refMask
}

// put adds a slot at the place that a search has found. The same slot must not be there.
func (t *table) put(b *shard, k int, hash uint32, ref place) {
	if (b.count+1)*5 > len(b.slots)*4 {
		t.resize(b, len(b.slots)+max(minSlots, len(b.slots)/4))
		k = b.search(hash)
	}
	t.count++
	b.count++
	for s := uint64(hash)<<refBits | uint64(ref); s != 0; k++ {
		s, b.slots[k] = b.slots[k], s
	}
	if k == len(b.slots) { // the last slot is used now, which must be free
		t.resize(b, len(b.slots)+max(minSlots, len(b.slots)/4))
	}
}

// drop removes a slot if it is there. It moves later slots back to their homes, so that a search
// meets no gap.
func (t *table) drop(hash uint64, ref place) {
	b, h := t.of(hash)
	if b.count == 0 {
		return
	}
	k := b.search(h)
	for ; b.slots[k] != uint64(h)<<refBits|uint64(ref); k++ {
		if !b.has(k, h) {
			return
		}
	}
	n := homes(len(b.slots))
	for ; b.slots[k+1] != 0 && homeOf(uint32(b.slots[k+1]>>refBits), n) <= k; k++ {
		b.slots[k] = b.slots[k+1]
	}
	b.slots[k] = 0
	b.count--
	t.count--
	switch size := len(b.slots); {
	case b.count == 0:
		t.slots -= size
		b.slots = nil
	case size > minSlots && b.count*2 < size:
		t.resize(b, max(minSlots, b.count*3/2))
	}
}

// resize gives a shard an array of slots, or a larger one if need be.
func (t *table) resize(b *shard, size int) {
	t.slots -= len(b.slots)
	for old := b.slots; ; size += size/4 + 1 {
		b.slots = make([]uint64, size)
		if b.fill(old) {
			break
		}
	}
	t.slots += len(b.slots)
}

// fill writes slots that are in order. It returns false if they do not fit.
func (b *shard) fill(from []uint64) bool {
	n, k := homes(len(b.slots)), 0
	for _, s := range from {
		if s == 0 {
			continue
		}
		if k = max(k, homeOf(uint32(s>>refBits), n)); k >= len(b.slots)-1 {
			return false
		}
		b.slots[k] = s
		k++
	}
	return true
}
