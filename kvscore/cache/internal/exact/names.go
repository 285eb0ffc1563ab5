package exact

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// names leads from the engines' names to places. Every held block has one name that its run
// keeps; the table has its place. Further names are aliases. The names of a block go
// when nobody holds it any more, or later: a search ignores and drops those left.
type names struct {
	table   table
	aliases map[uint64]place
	k0, k1  uint64
}

const (
	aliasBytes  = 44
	repeatBytes = 24
)

// hash returns the hash of a name for the table. It is keyed: some engines' names are weak
// hashes of what clients choose.
func (n *names) hash(name uint64) uint64 { return approx.Fold(name^n.k0, n.k1) }

// slot is where a name belongs in the table, until the table changes.
type slot struct {
	shard *shard
	k     int
	hash  uint32
}

// search returns the held block that a name leads to. If there is none, it returns nil and
// the name's slot. It drops names of blocks that nobody holds.
func (x *Index) search(name, hash uint64) (slot, *run, int32) {
	b, h := x.names.table.of(hash)
	k := 0
	if b.slots != nil {
		for k = b.search(h); b.has(k, h); k++ {
			if r, i := x.find(place(b.slots[k] & refMask)); r != nil && r.names[i] == name {
				return x.heldOr(name, hash, r, i)
			}
		}
	}
	if at, ok := x.names.aliases[name]; ok {
		r, i := x.find(at)
		return x.heldOr(name, hash, r, i)
	}
	return slot{b, k, h}, nil, 0
}

// heldOr returns a block that a name leads to, or searches again if nobody holds it.
func (x *Index) heldOr(name, hash uint64, r *run, i int32) (slot, *run, int32) {
	if x.holds(r, i) {
		return slot{}, r, i
	}
	x.forget(r, i, i+1)
	return x.search(name, hash)
}

func (x *Index) known(name uint64) (*run, int32) {
	_, r, i := x.search(name, x.names.hash(name))
	return r, i
}

// holds reports whether a target holds the block, or is about to.
func (x *Index) holds(r *run, i int32) bool {
	if r == x.work.run && i >= x.work.from && i < x.work.to {
		return true
	}
	held, _ := r.view.Load().held(i, i+1, x.columns.Load().valid)
	return held
}

// heldBy reports whether a target holds a block in any tier, or is about to.
func (x *Index) heldBy(r *run, i int32, target int) bool {
	if r == x.work.run && i >= x.work.from && i < x.work.to {
		return true
	}
	column := x.owners[target].column
	v := r.view.Load()
	for t := range v.tiers() {
		if setAt(v.tier(t), i).has(column) {
			return true
		}
	}
	return false
}

// nameBlock makes a name lead to block i of a run. further says that the block has another name. It
// is a contradiction if the name leads to another block.
func (x *Index) nameBlock(name, hash uint64, r *run, i int32, further bool) Outcome {
	at, other, k := x.search(name, hash)
	switch {
	case other == r && k == i && other != nil:
		return OK
	case other != nil:
		return Contradiction
	case further:
		x.names.aliases[name] = r.at(i)
		r.aliases = append(r.aliases, alias{name, i})
		return OK
	}
	r.names[i] = name
	x.names.table.put(at.shard, at.k, at.hash, r.at(i))
	return OK
}

// hashes returns the hashes of names. It also reads the slots where the search for them
// begins, one independent of the other: the processor then waits for all at once.
func (x *Index) hashes(names []uint64) []uint64 {
	list := slices.Grow(x.work.hashes[:0], len(names))[:len(names)]
	touched := uint64(0)
	for i, name := range names {
		hash := x.names.hash(name)
		if b, h := x.names.table.of(hash); len(b.slots) > 0 {
			k := homeOf(h, homes(len(b.slots)))
			touched |= b.slots[k] | b.slots[min(k+nearSlots, len(b.slots)-1)]
		}
		list[i] = hash
	}
	x.work.hashes, x.work.touched = list, touched
	return list
}

// nearSlots is how far from the first slot most searches end.
const nearSlots = 8

// forget drops the names of blocks that nobody holds any more. Some may be gone already.
func (x *Index) forget(r *run, from, to int32) {
	for i := from; i < to; i++ {
		x.names.table.drop(x.names.hash(r.names[i]), r.at(i))
	}
	if len(r.aliases) == 0 {
		return
	}
	r.aliases = slices.DeleteFunc(r.aliases, func(a alias) bool {
		if a.i < from || a.i >= to {
			return false
		}
		delete(x.names.aliases, a.name)
		return true
	})
	if len(r.aliases) == 0 {
		r.aliases = nil
	}
}

// forgetUnheld drops the names of blocks that have no holder.
func (x *Index) forgetUnheld(r *run, from, to int32) {
	v, valid := r.view.Load(), x.columns.Load().valid
	for i := from; i < to; {
		held, end := v.held(i, to, valid)
		if !held {
			x.forget(r, i, end)
		}
		i = end
	}
}
