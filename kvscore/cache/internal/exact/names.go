package exact

import (
	"hash/maphash"
	"maps"
	"math/bits"
)

// names leads from the engines' names to blocks that have a set. A map never shrinks by itself, and what is
// deleted leaves holes. So names copies a map that has lost a quarter of its names. There are many maps, so
// that no copy takes long. They differ in size, so that not all double at the same time.
//
// Some engines' names are weak hashes of what clients choose. The hash that finds the map is therefore keyed.
type names struct {
	seed  maphash.Seed
	parts [256]part
	bytes int64
}

type part struct {
	of    map[uint64]place
	added int // to the map, which is larger than what it has
}

// part returns the map for a name. The first map has twice as many names as the last.
func (n *names) part(name uint64) *part {
	h := maphash.Comparable(n.seed, name) >> 48
	return &n.parts[h*(h+2<<16)/(3<<32/uint64(len(n.parts)))]
}

// get returns the block of a name, 0 if there is none.
func (n *names) get(name uint64) place { return n.part(name).of[name] }

// put adds a name that is not there.
func (n *names) put(name uint64, at place) {
	p := n.part(name)
	if p.of == nil {
		p.of = make(map[uint64]place)
	}
	p.of[name] = at
	n.resize(p, p.added+1)
}

// delete removes a name that is there.
func (n *names) delete(name uint64) {
	p := n.part(name)
	delete(p.of, name)
	if left := len(p.of); left*4 < p.added*3 {
		to := make(map[uint64]place, left)
		maps.Copy(to, p.of)
		p.of = to
		n.resize(p, left)
	}
}

func (n *names) resize(p *part, added int) {
	n.bytes += nameBytes(added) - nameBytes(p.added)
	p.added = added
}

// nameBytes returns the memory of a map to which names were added, about. The number of its slots is a power
// of 2, and at most 7 of 8 are in use. Each takes 17 bytes.
func nameBytes(added int) int64 {
	if added == 0 {
		return 0
	}
	return 48 + 17*max(8, int64(1)<<bits.Len(uint(added*8-1)/7)) //nolint:gosec // not negative
}

// known returns the block that a name leads to, nil if no target holds it.
func (x *Index) known(name uint64) (place, *block) {
	at, b := x.held(name)
	if b == nil && at != 0 {
		x.dropNames(at)
		at = 0
	}
	return at, b
}

// nameBlock makes a name lead to a block. It is a contradiction if the name leads to another one.
func (x *Index) nameBlock(name uint64, at place) Outcome {
	b := x.block(at)
	held := !x.sets.list[b.set].empty()
	if held && b.name == name {
		return OK
	}
	other, found := x.known(name)
	switch {
	case found != nil && other != at:
		return Contradiction
	case found != nil:
		return OK
	case held:
		x.aliases[at] = append(x.aliases[at], name)
		x.bytes.aliases += aliasBytes
	default:
		x.dropNames(at)
		b.name = name
	}
	x.names.put(name, at)
	return OK
}

// dropNames takes the names of a block that no target holds.
func (x *Index) dropNames(at place) {
	b := x.block(at)
	if b.set == 0 {
		return
	}
	x.names.delete(b.name)
	for _, name := range x.aliases[at] {
		x.names.delete(name)
		x.bytes.aliases -= aliasBytes
	}
	delete(x.aliases, at)
	x.sets.assign(b, 0)
}
