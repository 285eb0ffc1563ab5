package exact

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// kids are the runs that continue a run, by their first block: an open-addressing hash table
// that readers search while the writer adds and removes. A cell never gets another key. A
// removed run leaves a cell without a run. Growth makes new kids, and readers that have
// the old ones may finish there.
//
// Many kids are divided into parts by bits of the key, and a part again. Growth therefore
// copies few at a time, even if every prompt begins with the same blocks.
type kids struct {
	cells []cell
	parts []atomic.Pointer[kids] // instead of cells
	shift int                    // of the key, for its part
	whole *kids                  // that this is a part of
	owner *run                   // nil for first runs, and in a part
	n     int                    // runs
	used  int                    // cells that have a key
}

type cell struct {
	key atomic.Uint64 // 0: never used
	run atomic.Pointer[run]
}

const (
	partBits  = 8
	manyKids  = 2048 // from here on, in parts
	fewKids   = 512  // below, not in parts any more
	firstPart = 64 - partBits
)

func newKids(owner *run, cells int) *kids {
	return &kids{cells: make([]cell, cells), owner: owner, shift: firstPart}
}

// newParts returns empty kids in parts.
func newParts(shift int) *kids {
	k := &kids{parts: make([]atomic.Pointer[kids], 1<<partBits), shift: shift}
	for i := range k.parts {
		p := newKids(nil, 16)
		p.shift, p.whole = shift-partBits, k
		k.parts[i].Store(p)
	}
	return k
}

// bytes includes the parts.
func (k *kids) bytes() int64 {
	n := int64(unsafe.Sizeof(*k)) + int64(len(k.cells))*int64(unsafe.Sizeof(cell{})) + int64(len(k.parts))*8
	for i := range k.parts {
		n += k.parts[i].Load().bytes()
	}
	return n
}

func (k *kids) at(key uint64) *atomic.Pointer[kids] {
	return &k.parts[key>>k.shift&(1<<partBits-1)]
}

// part returns the kids without parts that the key belongs to.
func (k *kids) part(key uint64) *kids {
	for k.parts != nil {
		k = k.at(key).Load()
	}
	return k
}

func (k *kids) base() *kids {
	for k.whole != nil {
		k = k.whole
	}
	return k
}

func (k *kids) each(f func(key uint64, r *run)) {
	for i := range k.parts {
		k.parts[i].Load().each(f)
	}
	for i := range k.cells {
		if r := k.cells[i].run.Load(); r != nil {
			f(k.cells[i].key.Load(), r)
		}
	}
}

// keyOf returns the key of a run that continues another. Content hashes are uniform.
func keyOf(block uint64) uint64 {
	return max(block, 1)
}

// topKey returns the key of a run that begins a chain.
func topKey(root, block uint64) uint64 {
	hi, lo := bits.Mul64(root^0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	return max(hi^lo^block, 1)
}

// find returns the run that begins with the block, or nil.
func (k *kids) find(key, root, block uint64) *run {
	if k.parts != nil {
		k = k.part(key)
	}
	mask := uint64(len(k.cells) - 1)
	i := key & mask
	for range k.cells {
		c := &k.cells[i]
		if r := c.run.Load(); r != nil {
			if c.key.Load() == key && r.first == block && r.root == root {
				return r
			}
		} else if c.key.Load() == 0 {
			return nil
		}
		i = (i + 1) & mask
	}
	return nil
}

func (k *kids) full() bool {
	return k.used == len(k.cells) || len(k.cells) > 8 && k.used*4 > len(k.cells)*3
}

func (k *kids) add(key uint64, r *run) {
	mask := uint64(len(k.cells) - 1)
	i := key & mask
	for k.cells[i].key.Load() != 0 {
		i = (i + 1) & mask
	}
	k.cells[i].key.Store(key)
	k.cells[i].run.Store(r)
	k.used++
	r.up = k
	k.count(1)
}

func (k *kids) remove(key uint64, r *run) {
	mask := uint64(len(k.cells) - 1)
	i := key & mask
	for k.cells[i].run.Load() != r {
		i = (i + 1) & mask
	}
	k.cells[i].run.Store(nil)
	k.count(-1)
}

func (k *kids) count(n int) {
	for ; k != nil; k = k.whole {
		k.n += n
	}
}

// sparse reports whether smaller kids should replace these.
func (k *kids) sparse() bool {
	if k.parts != nil {
		return k.n < fewKids
	}
	return len(k.cells) > 16 && k.n*8 < len(k.cells)
}

// resized returns kids of the right size with the same runs.
func (x *Index) resized(k *kids) *kids {
	var to *kids
	if k.n >= manyKids && k.shift >= 0 {
		to = newParts(k.shift)
	} else {
		size := 1
		for size < k.n+1 || size > 8 && size*5 < (k.n+1)*8 {
			size *= 2
		}
		to = newKids(nil, size)
		to.shift = k.shift
	}
	x.memory.runs += to.bytes() - k.bytes()
	k.each(func(key uint64, r *run) { x.insert(to, key, r) })
	to.owner, to.whole = k.owner, k.whole
	return to
}

// insert adds a run, and returns the kids: new ones if these had to grow.
func (x *Index) insert(k *kids, key uint64, r *run) *kids {
	p := k.part(key)
	for p.full() {
		if n := x.resized(p); p == k {
			k = n
		} else {
			p.whole.at(key).Store(n)
		}
		p = k.part(key)
	}
	p.add(key, r)
	return k
}

// only returns the run if there is exactly one.
func (k *kids) only() (one *run) {
	if k != nil && k.n == 1 {
		k.each(func(_ uint64, r *run) { one = r })
	}
	return one
}

// attach adds a run below another, or as a first run if up is nil.
func (x *Index) attach(up, r *run) {
	if up == nil {
		k := x.top.Load()
		if n := x.insert(k, topKey(r.root, r.first), r); n != k {
			x.top.Store(n)
		}
		return
	}
	v := up.view.Load()
	k := v.kids
	if k == nil {
		k = newKids(up, 1)
		x.memory.runs += k.bytes()
	}
	if k = x.insert(k, keyOf(r.first), r); k != v.kids {
		x.publish(up, v.hashes, k, v)
	}
}

// detach removes a run from its kids. It returns the run above, nil at the top.
func (x *Index) detach(r *run) *run {
	p := r.up
	k := p.base()
	up := k.owner
	key := keyOf(r.first)
	if up == nil {
		key = topKey(r.root, r.first)
	}
	p.remove(key, r)
	if p != k && p.sparse() {
		p.whole.at(key).Store(x.resized(p))
	}
	switch {
	case up == nil:
		if k.sparse() {
			x.top.Store(x.resized(k))
		}
		return nil
	case k.n == 0:
		x.memory.runs -= k.bytes()
		v := up.view.Load()
		x.publish(up, v.hashes, nil, v)
	case k.sparse():
		v := up.view.Load()
		x.publish(up, v.hashes, x.resized(k), v)
	}
	if k.n == 1 {
		x.sweep.dirty++ // the two may be joined
	}
	return up
}
