package exact

import (
	"math/bits"
	"slices"
	"unsafe"
)

// names leads from the engines' names to places. Every held block has one name that its run
// keeps; the table refers to its place. Further names are aliases: the table refers to a
// record with name and place. When nobody holds a block any more, its name goes. Its aliases
// stay until somebody meets them or [Index.Step] does: a lookup ignores a name of a block
// that nobody holds. A name may be a key of a target's own: see claim. Aliases of that kind
// go when Step finds that the target has been cleared.
type names struct {
	table   table
	aliases aliases
	k0, k1  uint64
}

// aliasFlag marks a reference to an alias. Other references are places.
const aliasFlag = 1 << placeBits

type alias struct {
	name uint64
	to   uint64 // a place in the low bits, a tag above
}

func (a *alias) place() place { return place(a.to & (1<<placeBits - 1)) }

func (a *alias) tag() tag { return tag(a.to >> placeBits) }

const aliasPage = 512

// aliases is an array in pages. The last one takes the place of a dropped one.
type aliases struct {
	pages [][]alias
	count int
}

func (n *names) init(k0, k1 uint64) {
	n.k0, n.k1 = k0, k1|1
	n.table.init()
}

func (n *names) bytes() int64 {
	return n.table.bytes() + int64(cap(n.aliases.pages))*24 +
		int64(len(n.aliases.pages))*aliasPage*int64(unsafe.Sizeof(alias{}))
}

// hash returns the hash of a name for the table. It is keyed: some engines' names are weak
// hashes of what clients choose.
func (n *names) hash(name uint64) uint32 {
	hi, lo := bits.Mul64(name^n.k0, n.k1)
	return uint32((hi ^ lo) >> (64 - hashBits))
}

func (a *aliases) at(i int) *alias { return &a.pages[i/aliasPage][i%aliasPage] }

// lookup finds a reference for the name, and the block that it leads to. r is nil if the
// name is not there, and k is its place in the bucket. The block may be gone (i is -1), or
// nobody may hold it.
func (x *Index) lookup(name uint64, b *bucket, hash uint32) (k int, ref uint64, r *run, i int32) {
	for k = b.search(hash); b.has(k, hash); k++ {
		ref = b.slots[k] & refMask
		if ref&aliasFlag == 0 {
			if r, i = x.chunks.at(place(ref)); r != nil && r.names[i] == name {
				return k, ref, r, i
			}
		} else if a := x.names.aliases.at(int(ref &^ aliasFlag)); a.name == name {
			if r, i = x.chunks.at(a.place()); r == nil {
				return k, ref, gone, -1
			}
			return k, ref, r, i
		}
	}
	return k, 0, nil, -1
}

// gone stands for the run of an alias that leads nowhere.
var gone = &run{}

// spot is where a name belongs in the table, until the table changes. It is small, so that
// the compiler keeps it in registers.
type spot struct {
	bucket *bucket
	k      int32
	hash   uint32
}

// search returns the held block that a name leads to. If there is none, it returns nil and
// the name's spot. It drops names of blocks that nobody holds.
func (x *Index) search(name uint64, hash uint32) (spot, *run, int32) {
	for {
		b := x.names.table.of(hash)
		k, ref, r, i := x.lookup(name, b, hash)
		if r == nil || r != gone && x.holds(r, i) {
			return spot{b, int32(k), hash}, r, i
		}
		if ref&aliasFlag != 0 {
			x.dropAlias(int(ref&^aliasFlag), hash)
		} else {
			x.names.table.drop(hash, ref)
		}
	}
}

// holds reports whether a target holds the block, or is about to.
func (x *Index) holds(r *run, i int32) bool {
	if r == x.work.run && i >= x.work.from && i < x.work.to {
		return true
	}
	held, _ := r.view.Load().held(i, i+1)
	return held
}

// name gives a block its name. It must have none.
func (x *Index) name(r *run, i int32, c claim) {
	x.countOwn(c)
	r.names[i] = c.key
	x.names.table.putAt(c.at.bucket, int(c.at.k), c.at.hash, uint64(r.place(i)))
}

// hashes returns the hashes of names. It also reads the slots where the search for them
// begins, one independent of the other: the processor then waits for all at once.
func (x *Index) hashes(names []uint64) []uint32 {
	list := slices.Grow(x.work.hashes[:0], len(names))[:len(names)]
	touched := uint64(0)
	for i, name := range names {
		h := x.names.hash(name)
		b := x.names.table.of(h)
		k := b.home(h)
		touched |= b.slots[k] | b.slots[min(k+nearSlots, len(b.slots)-1)]
		list[i] = h
	}
	x.work.hashes, x.work.touched = list, touched
	return list
}

// nearSlots is how far from the first slot most searches end.
const nearSlots = 8

// forget drops the names of blocks that nobody holds any more. Some may be gone already.
func (x *Index) forget(r *run, from, to int32) {
	for i, h := range x.hashes(r.names[from:to]) {
		x.names.table.drop(h, uint64(r.place(from+int32(i))))
	}
	if x.chunks.get(r.chunk).aliases > 0 {
		x.sweep.aliased++
	}
}

// also gives a block a further name.
func (x *Index) also(r *run, i int32, c claim) {
	x.countOwn(c)
	a := &x.names.aliases
	if a.count == len(a.pages)*aliasPage {
		a.pages = append(a.pages, make([]alias, aliasPage))
	}
	*a.at(a.count) = alias{c.key, uint64(r.place(i)) | uint64(c.by)<<placeBits}
	x.names.table.putAt(c.at.bucket, int(c.at.k), c.at.hash, aliasFlag|uint64(a.count))
	a.count++
	x.chunks.get(r.chunk).aliases++
}

func (x *Index) countOwn(c claim) {
	if c.by != 0 {
		x.stats.Apart++
	}
}

func (x *Index) dropAlias(i int, hash uint32) {
	a := &x.names.aliases
	x.names.table.drop(hash, aliasFlag|uint64(i))
	chunk := uint32(a.at(i).place() >> offsetBits)
	a.count--
	if i != a.count {
		last := a.at(a.count)
		*a.at(i) = *last
		x.names.table.replace(x.names.hash(last.name), aliasFlag|uint64(a.count), aliasFlag|uint64(i))
	}
	// One page more than needed stays, so that a page does not come and go.
	if n := len(a.pages); a.count == 0 {
		a.pages = nil
	} else if n > 1 && a.count <= (n-2)*aliasPage {
		a.pages[n-1] = nil
		a.pages = a.pages[:n-1]
	}
	k := x.chunks.get(chunk)
	k.aliases--
	x.chunks.settle(chunk)
}
