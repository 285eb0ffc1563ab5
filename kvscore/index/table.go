package index

import "math/bits"

const minTable = 64

// table finds a run by its parent, root and first block: open addressing with
// linear probing. An entry keeps 32 bits of the key's hash; the run itself
// settles whether it is the one.
type table struct {
	entries []entry
	count   int
	k0, k1  uint64
}

type entry struct{ hash, run uint32 } // run 0: empty

// hash is keyed with both k0 and k1, so that neither factor can be chosen to be
// zero from outside.
func (t *table) hash(parent uint32, root, block uint64) uint32 {
	hi, lo := bits.Mul64(block^t.k0, (root+uint64(parent)*0x9e3779b97f4a7c15)^t.k1)
	h := (hi ^ lo) * 0x9e3779b97f4a7c15
	return uint32(h >> 32)
}

func (t *table) bytes() int64 { return int64(len(t.entries)) * 8 }

// growth returns the bytes that n more entries will add.
func (t *table) growth(n int) int64 {
	size := max(len(t.entries), minTable)
	for (t.count+n)*4 > size*3 {
		size *= 2
	}
	return int64(size-len(t.entries)) * 8
}

func (t *table) put(hash, run uint32) {
	if g := t.growth(1); g > 0 {
		t.resize(len(t.entries) + int(g/8))
	}
	mask := uint32(len(t.entries) - 1)
	i := hash & mask
	for t.entries[i].run != 0 {
		i = (i + 1) & mask
	}
	t.entries[i] = entry{hash, run}
	t.count++
}

// replace makes the entry of one run that of another with the same key.
func (t *table) replace(hash, old, run uint32) {
	t.entries[t.find(hash, old)].run = run
}

func (t *table) find(hash, run uint32) uint32 {
	mask := uint32(len(t.entries) - 1)
	i := hash & mask
	for t.entries[i].run != run {
		i = (i + 1) & mask
	}
	return i
}

// drop removes an entry and moves later ones up, so that no probe meets a gap.
func (t *table) drop(hash, run uint32) {
	mask := uint32(len(t.entries) - 1)
	gap := t.find(hash, run)
	for i := (gap + 1) & mask; t.entries[i].run != 0; i = (i + 1) & mask {
		home := t.entries[i].hash & mask
		if (i-home)&mask >= (i-gap)&mask {
			t.entries[gap] = t.entries[i]
			gap = i
		}
	}
	t.entries[gap] = entry{}
	t.count--
	if len(t.entries) > minTable && t.count*8 < len(t.entries) {
		t.resize(len(t.entries) / 2)
	}
}

func (t *table) resize(size int) {
	old := t.entries
	t.entries = make([]entry, size)
	mask := uint32(size - 1)
	for _, e := range old {
		if e.run == 0 {
			continue
		}
		i := e.hash & mask
		for t.entries[i].run != 0 {
			i = (i + 1) & mask
		}
		t.entries[i] = e
	}
}

// clear drops all entries and keeps the size.
func (t *table) clear() {
	clear(t.entries)
	t.count = 0
}

// child returns the run below parent that begins with block, or 0.
func (x *Index) child(parent uint32, root, block uint64) uint32 {
	t := &x.table
	if len(t.entries) == 0 {
		return 0
	}
	hash := t.hash(parent, root, block)
	mask := uint32(len(t.entries) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		e := t.entries[i]
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

// keyHash returns the hash under which a run is in the table.
func (x *Index) keyHash(r *run) uint32 {
	return x.table.hash(r.parent, r.root, r.hashes[0])
}
