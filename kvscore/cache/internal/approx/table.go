package approx

import (
	"math/bits"
	"unsafe"
)

const (
	minTable = 64
	// segmentSize is the greatest number of entries before a segment splits.
	segmentSize  = 2048
	segmentBytes = segmentSize*8 + segmentHead
	segmentHead  = int64(unsafe.Sizeof(segment{})) + 8
	maxDepth     = 18
)

// table finds a run by its parent, root and first block. An entry keeps 32 bits of the key's
// hash; the lookup compares the key with the run itself.
//
// The table uses extendible hashing: the hash's high bits choose a segment. Each segment
// grows, splits and merges by itself, so that adding or removing an entry costs at most
// one segment's work. A segment uses open addressing with linear probing.
type table struct {
	dir     []place // by the high bits of the hash; nil if the table is empty
	shift   uint8   // 32 less the number of these bits
	deepest int     // segments with one place in dir
	count   int
	size    int64 // bytes of segments
	k0, k1  uint64
	worked  int // entries moved since the last reset to 0
}

// place points to a segment, and to its entries to save one step.
type place struct {
	entries []entry
	*segment
}

const placeBytes = int64(unsafe.Sizeof(place{}))

type segment struct {
	entries []entry
	count   int
	depth   uint8 // high bits that all its hashes share
}

type entry struct{ hash, run uint32 } // run 0: empty

// hash uses both k0 and k1 as keys, so that a client cannot make a factor zero. The seed is
// the parent's.
func (t *table) hash(seed uint16, root, block uint64) uint32 {
	hi, lo := bits.Mul64(block^t.k0, (root+uint64(seed)*0x9e3779b97f4a7c15)^t.k1)
	h := (hi ^ lo) * 0x9e3779b97f4a7c15
	return uint32(h >> 32)
}

func (t *table) depth() uint8 { return 32 - t.shift }

func (t *table) place(hash uint32) *place { return &t.dir[uint64(hash)>>(t.shift&63)] }

func (t *table) segment(hash uint32) *segment { return t.place(hash).segment }

func (t *table) bytes() int64 { return t.size + int64(cap(t.dir))*placeBytes }

// growth returns the bytes that n more entries add at most.
func (t *table) growth(n int) int64 {
	if n == 0 {
		return 0
	}
	if len(t.dir) > 1 {
		return int64(n)*segmentBytes + int64(len(t.dir))*placeBytes
	}
	have, count := 0, 0
	if len(t.dir) == 1 {
		have, count = len(t.dir[0].entries), t.count
	}
	size := max(have, minTable)
	for (count+n)*4 > size*3 {
		size *= 2
	}
	if size == have {
		return 0
	}
	return int64(size-have)*8 + 4*(segmentHead+placeBytes)
}

func (t *table) make(size int, depth uint8) *segment {
	t.size += int64(size)*8 + segmentHead
	return &segment{entries: make([]entry, size), depth: depth}
}

func (t *table) free(s *segment) { t.size -= int64(len(s.entries))*8 + segmentHead }

// reset drops everything but the keys.
func (t *table) reset() { *t = table{k0: t.k0, k1: t.k1} }

func (t *table) put(hash, run uint32) {
	if t.dir == nil {
		t.dir, t.shift, t.deepest = make([]place, 1), 32, 1
		t.enter(t.make(minTable, 0), 0)
	}
	s := t.segment(hash)
	for (s.count+1)*4 > len(s.entries)*3 {
		if len(s.entries) < segmentSize || s.depth == maxDepth {
			t.resize(s, hash, 2*len(s.entries))
		} else {
			t.split(s, hash)
			s = t.segment(hash)
		}
	}
	s.put(hash, run)
	t.count++
}

func (s *segment) put(hash, run uint32) {
	mask := uint32(len(s.entries) - 1)
	i := hash & mask
	for s.entries[i].run != 0 {
		i = (i + 1) & mask
	}
	s.entries[i] = entry{hash, run}
	s.count++
}

// take adds the entries of another segment.
func (s *segment) take(from []entry) {
	for _, e := range from {
		if e.run != 0 {
			s.put(e.hash, e.run)
		}
	}
}

// resize changes the size of the segment of the hash.
func (t *table) resize(s *segment, hash uint32, size int) {
	old := s.entries
	t.worked += len(old)
	t.size += int64(size-len(old)) * 8
	s.entries, s.count = make([]entry, size), 0
	s.take(old)
	t.enter(s, hash)
}

// split divides the segment of the hash by the next bit.
func (t *table) split(s *segment, hash uint32) {
	if s.depth == t.depth() {
		wide := make([]place, 2*len(t.dir))
		for i, d := range t.dir {
			wide[2*i], wide[2*i+1] = d, d
		}
		t.worked += len(t.dir)
		t.dir, t.deepest = wide, 0
		t.shift--
	}
	bit := uint32(1) << (31 - s.depth)
	low, high := t.make(segmentSize, s.depth+1), t.make(segmentSize, s.depth+1)
	for _, e := range s.entries {
		switch {
		case e.run == 0:
		case e.hash&bit == 0:
			low.put(e.hash, e.run)
		default:
			high.put(e.hash, e.run)
		}
	}
	t.worked += len(s.entries)
	t.free(s)
	t.enter(low, hash&^bit)
	t.enter(high, hash|bit)
	if low.depth == t.depth() {
		t.deepest += 2
	}
}

// enter puts a segment at all places of the directory for hashes that share its bits.
func (t *table) enter(s *segment, hash uint32) {
	n := 1 << (t.depth() - s.depth)
	from := int(uint64(hash)>>(32-s.depth)) * n
	for i := range n {
		t.dir[from+i] = place{s.entries, s}
	}
	t.worked += n
}

// replace points the entry of one run to another run with the same key.
func (t *table) replace(hash, old, run uint32) {
	s := t.segment(hash)
	s.entries[s.find(hash, old)].run = run
}

func (s *segment) find(hash, run uint32) uint32 {
	mask := uint32(len(s.entries) - 1)
	i := hash & mask
	for s.entries[i].run != run {
		i = (i + 1) & mask
	}
	return i
}

// drop removes an entry and moves later ones up, so that probing meets no gap.
func (t *table) drop(hash, run uint32) {
	s := t.segment(hash)
	mask := uint32(len(s.entries) - 1)
	gap := s.find(hash, run)
	for i := (gap + 1) & mask; s.entries[i].run != 0; i = (i + 1) & mask {
		home := s.entries[i].hash & mask
		if (i-home)&mask >= (i-gap)&mask {
			s.entries[gap] = s.entries[i]
			gap = i
		}
	}
	s.entries[gap] = entry{}
	s.count--
	t.count--
	switch {
	case s.depth > 0:
		t.merge(s, hash)
	case len(s.entries) > minTable && s.count*8 < len(s.entries):
		t.resize(s, hash, len(s.entries)/2)
	}
}

// merge joins a segment with the one that it was split from, if both are sparse.
func (t *table) merge(s *segment, hash uint32) {
	const few = segmentSize * 3 / 8
	if s.count > few/2 {
		return
	}
	buddy := t.segment(hash ^ 1<<(32-s.depth))
	if buddy.depth != s.depth || s.count+buddy.count > few {
		return
	}
	if s.depth == t.depth() {
		t.deepest -= 2
	}
	one := t.make(segmentSize, s.depth-1)
	one.take(s.entries)
	one.take(buddy.entries)
	t.worked += 2 * segmentSize
	t.free(s)
	t.free(buddy)
	t.enter(one, hash)
	for t.deepest == 0 {
		t.narrow()
	}
}

// narrow halves the directory, in which every segment has at least two places.
func (t *table) narrow() {
	half := make([]place, len(t.dir)/2)
	for i := range half {
		half[i] = t.dir[2*i]
	}
	t.worked += len(t.dir)
	t.dir = half
	t.shift++
	for _, p := range half {
		if p.depth == t.depth() {
			t.deepest++
		}
	}
}

// child returns the run below parent that begins with block, or 0. The seed is
// the parent's, 0 at the top.
func (x *Index) child(parent uint32, seed uint16, root, block uint64) uint32 {
	t := &x.table
	if len(t.dir) == 0 {
		return 0
	}
	hash := t.hash(seed, root, block)
	entries := t.place(hash).entries
	mask := uint32(len(entries) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		e := entries[i]
		if e.run == 0 {
			return 0
		}
		if e.hash != hash {
			continue
		}
		if r := x.runs.at(e.run); r.parent == parent && r.root == root && r.hashes[0] == block {
			return e.run
		}
	}
}

// seedOf returns the seed of a run, 0 for no run.
func (x *Index) seedOf(id uint32) uint16 {
	if id == 0 {
		return 0
	}
	return x.runs.at(id).seed
}

// keyHash returns the hash of a run's key in the table.
func (x *Index) keyHash(r *run) uint32 {
	return x.table.hash(x.seedOf(r.parent), r.root, r.hashes[0])
}
