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
type table struct {
	dir     []*bucket
	depth   uint8 // bits of the directory
	deepest int   // buckets that use all of them
	count   int
	slots   int
}

type bucket struct {
	slots []uint64
	count int32
	depth uint8
}

func (t *table) init() {
	t.dir = []*bucket{t.bucket(minSlots, 0)}
	t.deepest = 1
}

func (t *table) bytes() int64 {
	return int64(len(t.dir))*8 + int64(t.slots)*slotBytes + int64(t.count/2000+1)*48
}

func (t *table) bucket(slots int, depth uint8) *bucket {
	t.slots += slots
	return &bucket{slots: make([]uint64, slots), depth: depth}
}

func (t *table) of(hash uint32) *bucket { return t.dir[hash>>(hashBits-t.depth)] }

// home returns the slot where the search for a hash begins.
func (b *bucket) home(hash uint32) int {
	return int(uint64(hash<<(32-hashBits+b.depth)) * uint64(len(b.slots)) >> 32)
}

func (b *bucket) put(slot uint64) {
	i := b.home(uint32(slot >> refBits))
	for b.slots[i] != 0 {
		if i++; i == len(b.slots) {
			i = 0
		}
	}
	b.slots[i] = slot
	b.count++
}

// put adds a slot. The same slot must not be there.
func (t *table) put(hash uint32, ref uint64) {
	b := t.of(hash)
	if int(b.count+1)*5 > len(b.slots)*4 {
		t.grow(b, hash)
		b = t.of(hash)
	}
	b.put(uint64(hash)<<refBits | ref)
	t.count++
}

// find returns the place of a slot in its bucket, or -1.
func (b *bucket) find(hash uint32, ref uint64) int {
	want := uint64(hash)<<refBits | ref
	for i := b.home(hash); b.slots[i] != 0; {
		if b.slots[i] == want {
			return i
		}
		if i++; i == len(b.slots) {
			i = 0
		}
	}
	return -1
}

// replace changes the reference of a slot, which must be there.
func (t *table) replace(hash uint32, old, ref uint64) {
	b := t.of(hash)
	b.slots[b.find(hash, old)] = uint64(hash)<<refBits | ref
}

// drop removes a slot, and reports whether it was there. It moves later slots up, so that a
// search meets no gap.
func (t *table) drop(hash uint32, ref uint64) bool {
	b := t.of(hash)
	gap := b.find(hash, ref)
	if gap < 0 {
		return false
	}
	n := len(b.slots)
	for i := gap; ; {
		if i++; i == n {
			i = 0
		}
		if b.slots[i] == 0 {
			break
		}
		home := b.home(uint32(b.slots[i] >> refBits))
		if distance(home, i, n) >= distance(gap, i, n) {
			b.slots[gap] = b.slots[i]
			gap = i
		}
	}
	b.slots[gap] = 0
	b.count--
	t.count--
	if int(b.count)*2 < n {
		t.shrink(b, hash)
	}
	return true
}

// distance returns how many slots after from to is, in a ring of n.
func distance(from, to, n int) int {
	if to < from {
		return to - from + n
	}
	return to - from
}

// fit returns a number of slots for keys with some room to grow.
func fit(keys int) int {
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
	old := b.slots
	t.slots += slots - len(old)
	b.slots, b.count = make([]uint64, slots), 0
	b.take(old)
}

func (b *bucket) take(from []uint64) {
	for _, s := range from {
		if s != 0 {
			b.put(s)
		}
	}
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
	n := fit(int(b.count) / 2)
	low, high := t.bucket(n, b.depth+1), t.bucket(n, b.depth+1)
	for _, s := range b.slots {
		to := low
		if uint32(s>>refBits)&bit != 0 {
			to = high
		}
		if s == 0 {
			continue
		}
		if int(to.count+1)*5 > len(to.slots)*4 { // a very uneven division
			t.resize(to, len(to.slots)+slotStep)
		}
		to.put(s)
	}
	t.slots -= len(b.slots)
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
	if n := fit(int(b.count)); n < len(b.slots) {
		t.resize(b, n)
	}
}

// merge joins a bucket with the one that it was divided from.
func (t *table) merge(b, buddy *bucket, hash uint32) {
	if b.depth == t.depth {
		t.deepest -= 2
	}
	one := t.bucket(fit(int(b.count+buddy.count)), b.depth-1)
	one.take(b.slots)
	one.take(buddy.slots)
	t.slots -= len(b.slots) + len(buddy.slots)
	t.enter(one, hash)
	if one.depth == t.depth {
		t.deepest++
	}
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
