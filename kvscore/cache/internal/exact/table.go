package exact

// A slot of the table has the hash of a name and a reference: see names. 0 is a free slot.
const (
	hashBits = 30
	refBits  = 34
	refMask  = 1<<refBits - 1
)

const (
	minSlots  = 16
	slotStep  = 512 // larger buckets grow by this number of slots
	maxSlots  = 2048
	fewKeys   = 700 // two neighbours with fewer become one bucket
	maxDepth  = 18
	slotBytes = 8
)

// table is an extendible hash table of 8-byte slots: a directory, by the hash's first bits,
// of buckets that each use linear probing. A bucket grows in small steps and then divides.
// Growth therefore costs little at a time, and most slots are in use. It needs no names.
//
// The slots of a bucket are in the order of their hashes, with free ones in between. A search
// for an unknown name therefore ends early, and growth reads and writes one slot after the
// other.
type table struct {
	dir     []*bucket
	depth   uint8 // bits of the directory
	deepest int   // buckets that use all of them
	count   int
	slots   int
}

type bucket struct {
	slots []uint64 // the last is always free
	count int32
	depth uint8
}

func (t *table) init() {
	t.dir = []*bucket{{slots: make([]uint64, minSlots)}}
	t.slots, t.deepest = minSlots, 1
}

func (t *table) bytes() int64 {
	return int64(len(t.dir))*8 + int64(t.slots)*slotBytes + int64(t.count/2000+1)*48
}

func (t *table) of(hash uint32) *bucket { return t.dir[hash>>(hashBits-t.depth)] }

// homes returns how many slots are a home. Those after them take what is moved over the end:
// one that stays free, one at least, and more in a larger bucket. Without enough of them, a
// bucket would grow because of its end alone.
func (b *bucket) homes() uint64 { return uint64(len(b.slots) - len(b.slots)/64 - 2) }

// home returns the slot where the search for a hash begins.
func (b *bucket) home(hash uint32) int {
	return homeOf(hash, b.depth, b.homes())
}

func homeOf(hash uint32, depth uint8, homes uint64) int {
	return int(uint64(hash<<(32-hashBits+depth)) * homes >> 32)
}

// search returns the first slot of the hash, or the place for one.
func (b *bucket) search(hash uint32) int {
	k := b.home(hash)
	for least := uint64(hash) << refBits; b.slots[k]-1 < least; { // a free slot less 1 is large
		k++
	}
	return k
}

// has reports whether slot k has the hash. A free slot has none, not even 0: this relies on a
// reference never being 0, see chunks.init.
func (b *bucket) has(k int, hash uint32) bool {
	return b.slots[k]-uint64(hash)<<refBits-1 < refMask
}

// put adds a slot. The same slot must not be there.
func (t *table) put(hash uint32, ref uint64) {
	b := t.of(hash)
	t.putAt(b, b.search(hash), hash, ref)
}

// putAt is put for a caller that has searched for the hash.
func (t *table) putAt(b *bucket, k int, hash uint32, ref uint64) {
	if int(b.count+1)*5 > len(b.slots)*4 {
		t.grow(b, hash)
		b = t.of(hash)
		k = b.search(hash)
	}
	t.count++
	b.count++
	for s := uint64(hash)<<refBits | ref; s != 0; k++ {
		s, b.slots[k] = b.slots[k], s
	}
	if k == len(b.slots) { // the last slot is used now, which must be free
		t.grow(b, hash)
	}
}

// find returns the place of a slot in its bucket, or -1.
func (b *bucket) find(hash uint32, ref uint64) int {
	for k := b.search(hash); b.has(k, hash); k++ {
		if b.slots[k]&refMask == ref {
			return k
		}
	}
	return -1
}

// replace changes the reference of a slot, which must be there.
func (t *table) replace(hash uint32, old, ref uint64) {
	b := t.of(hash)
	b.slots[b.find(hash, old)] = uint64(hash)<<refBits | ref
}

// drop removes a slot, and reports whether it was there. It moves later slots back to their
// homes, so that a search meets no gap.
func (t *table) drop(hash uint32, ref uint64) bool {
	b := t.of(hash)
	k := b.find(hash, ref)
	if k < 0 {
		return false
	}
	for ; b.slots[k+1] != 0 && b.home(uint32(b.slots[k+1]>>refBits)) <= k; k++ {
		b.slots[k] = b.slots[k+1]
	}
	b.slots[k] = 0
	b.count--
	t.count--
	if int(b.count)*2 < len(b.slots) {
		t.shrink(b, hash)
	}
	return true
}

// slotsFor returns a number of slots for keys with some room to grow.
func slotsFor(keys int) int {
	want := keys*15/8 + 1
	if want > slotStep {
		return (want + slotStep - 1) / slotStep * slotStep
	}
	n := minSlots
	for n < want {
		n *= 2
	}
	return n
}

func (t *table) grow(b *bucket, hash uint32) {
	n := len(b.slots)
	switch {
	case n < slotStep:
		t.resize(b, 2*n)
	case n < maxSlots || b.depth == maxDepth:
		t.resize(b, n+slotStep)
	default:
		t.split(b, hash)
	}
}

func (t *table) resize(b *bucket, slots int) {
	t.slots -= len(b.slots)
	b.fill(slots, b.slots, nil)
	t.slots += len(b.slots)
}

// fill gives a bucket an array of slots, or a larger one if need be, with the slots of two
// others that are in order.
func (b *bucket) fill(slots int, low, high []uint64) {
	for ; ; slots += min(slots, slotStep) {
		b.slots = make([]uint64, slots)
		if n, k := b.take(low, 0); k >= 0 {
			if m, k := b.take(high, k); k >= 0 {
				b.count = n + m
				return
			}
		}
	}
}

// take writes slots that are in order, from place k on. It returns their number, and the next
// place, -1 if they do not fit.
func (b *bucket) take(from []uint64, k int) (n int32, next int) {
	homes, to := b.homes(), b.slots
	for _, s := range from {
		k = max(k, homeOf(uint32(s>>refBits), b.depth, homes)) // 0 for a free slot
		if k >= len(to)-1 {
			return 0, -1
		}
		if to[k] = s; s != 0 {
			k++
			n++
		}
	}
	return n, k
}

// split divides a bucket by the next bit of the hash.
func (t *table) split(b *bucket, hash uint32) {
	if b.depth == t.depth {
		wide := make([]*bucket, 2*len(t.dir))
		for i, d := range t.dir {
			wide[2*i], wide[2*i+1] = d, d
		}
		t.dir, t.deepest = wide, 0
		t.depth++
	}
	bit := uint32(1) << (hashBits - 1 - b.depth)
	n := slotsFor(int(b.count) / 2)
	middle := 0
	for i, s := range b.slots {
		if s != 0 && uint32(s>>refBits)&bit == 0 {
			middle = i + 1
		}
	}
	low, high := &bucket{depth: b.depth + 1}, &bucket{depth: b.depth + 1}
	low.fill(n, b.slots[:middle], nil)
	high.fill(n, b.slots[middle:], nil)
	t.slots += len(low.slots) + len(high.slots) - len(b.slots)
	t.enter(low, hash&^bit)
	t.enter(high, hash|bit)
	if low.depth == t.depth {
		t.deepest += 2
	}
}

// enter puts a bucket at all places of the directory that begin with its bits.
func (t *table) enter(b *bucket, hash uint32) {
	n := 1 << (t.depth - b.depth)
	from := int(hash>>(hashBits-b.depth)) * n
	for i := range n {
		t.dir[from+i] = b
	}
}

func (t *table) shrink(b *bucket, hash uint32) {
	if b.depth > 0 && b.count < fewKeys/2 {
		buddy := t.of(hash ^ 1<<(hashBits-b.depth))
		if buddy.depth == b.depth && b.count+buddy.count < fewKeys {
			t.merge(b, buddy, hash)
			return
		}
	}
	if n := slotsFor(int(b.count)); n < len(b.slots) {
		t.resize(b, n)
	}
}

// merge joins a bucket with the one that it was divided from.
func (t *table) merge(b, buddy *bucket, hash uint32) {
	if b.depth == t.depth {
		t.deepest -= 2
	}
	low, high := b, buddy
	if hash>>(hashBits-b.depth)&1 != 0 {
		low, high = buddy, b
	}
	one := &bucket{depth: b.depth - 1}
	one.fill(slotsFor(int(b.count+buddy.count)), low.slots, high.slots)
	t.slots += len(one.slots) - len(low.slots) - len(high.slots)
	t.enter(one, hash)
	for t.deepest == 0 && t.depth > 0 {
		t.narrow()
	}
}

// narrow halves the directory, in which every bucket has at least two places.
func (t *table) narrow() {
	half := make([]*bucket, len(t.dir)/2)
	for i := range half {
		half[i] = t.dir[2*i]
	}
	t.dir = half
	t.depth--
	for _, b := range half {
		if b.depth == t.depth {
			t.deepest++
		}
	}
}
