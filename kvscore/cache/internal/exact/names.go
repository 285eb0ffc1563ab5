package exact

import (
	"math/bits"
	"math/rand/v2"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// names leads from the engines' names to blocks that have a set. It is a hash table with linear
// probing. Its parts grow and shrink alone, so that no call takes long. A map of Go keeps its memory,
// and does not say how much that is.
//
// Some engines' names are weak hashes of what clients choose. The table's own hash is therefore keyed.
type names struct {
	parts [256]part
	key   [2]uint64
	slots int
}

type part struct {
	slots []slot
	used  int
}

type slot struct {
	name uint64
	at   place // 0: the slot is free
}

const slotBytes = 16

func (n *names) init() { n.key = [2]uint64{rand.Uint64(), rand.Uint64() | 1} } //nolint:gosec // the runtime seeds it

func (n *names) hash(name uint64) uint64 { return approx.Fold(name^n.key[0], n.key[1]) }

func (n *names) part(hash uint64) *part { return &n.parts[hash%uint64(len(n.parts))] }

// home returns the slot where the search for a hash begins.
func (p *part) home(hash uint64) int {
	i, _ := bits.Mul64(hash, uint64(len(p.slots)))
	return int(i) //nolint:gosec // below the number of slots
}

func (p *part) next(i int) int {
	if i++; i < len(p.slots) {
		return i
	}
	return 0
}

// search returns the slot of a name, or the free one for it.
func (p *part) search(name, hash uint64) int {
	i := p.home(hash)
	for p.slots[i].at != 0 && p.slots[i].name != name {
		i = p.next(i)
	}
	return i
}

// get returns the block of a name, 0 if there is none.
func (n *names) get(name uint64) place {
	hash := n.hash(name)
	p := n.part(hash)
	if p.used == 0 {
		return 0
	}
	return p.slots[p.search(name, hash)].at
}

// put adds a name that is not there.
func (n *names) put(name uint64, at place) {
	hash := n.hash(name)
	p := n.part(hash)
	if p.used++; p.used*4 > len(p.slots)*3 {
		n.resize(p, p.used*2+4)
	}
	p.slots[p.search(name, hash)] = slot{name, at}
}

// delete removes a name that is there. It moves later names back, so that a search meets no gap.
func (n *names) delete(name uint64) {
	hash := n.hash(name)
	p := n.part(hash)
	gap := p.search(name, hash)
	for i := p.next(gap); p.slots[i].at != 0; i = p.next(i) {
		size := len(p.slots)
		if home := p.home(n.hash(p.slots[i].name)); (i-home+size)%size >= (i-gap+size)%size {
			p.slots[gap] = p.slots[i]
			gap = i
		}
	}
	p.slots[gap] = slot{}
	switch p.used--; {
	case p.used == 0:
		n.resize(p, 0)
	case p.used*4+16 < len(p.slots):
		n.resize(p, p.used*2+4)
	}
}

func (n *names) resize(p *part, size int) {
	old := p.slots
	n.slots += size - len(old)
	p.slots = make([]slot, size)
	for _, s := range old {
		if s.at != 0 {
			p.slots[p.search(s.name, n.hash(s.name))] = s
		}
	}
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
		x.blocks++
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
	x.assign(at, 0)
	x.blocks--
}
