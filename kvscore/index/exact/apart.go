package exact

import "math/bits"

// A target is apart if one of its names has led to a block that only other targets hold.
// Such a name gets a key of the target's own, and the table has the key instead of the name.
// A search for a name of this target tries that key first.

// own returns the key of a target's own for a name. Only the index can compute it. It is
// another one after a Clear.
func (x *Index) own(target int, name uint64) uint64 {
	who := uint64(target)<<32 | uint64(x.owners[target].life)
	hi, lo := bits.Mul64(name^x.names.k1, (x.names.k0^who*0x9e3779b97f4a7c15)|1)
	return hi ^ lo
}

// known returns the held block that a target's name leads to, or nil.
func (x *Index) known(target int, name uint64) (*run, int32) {
	if x.owners[target].apart {
		own := x.own(target, name)
		if _, r, i := x.search(own, x.names.hash(own)); r != nil {
			return r, i
		}
	}
	_, r, i := x.search(name, x.names.hash(name))
	return r, i
}

// claim is how the table is to call a block that a target names.
type claim struct {
	key  uint64 // the name, or a key of the target's own
	at   spot   // of the key
	done bool   // the key leads to the block already
}

// claim finds what the table is to call block i of a run. r is nil for a block that nobody
// holds. It is a contradiction if the name leads to another block that the target holds.
func (x *Index) claim(target int, name uint64, hash uint32, r *run, i int32) (claim, Outcome) {
	at, other, k := x.search(name, hash)
	free, same := other == nil, other != nil && other == r && k == i
	o := &x.owners[target]
	if (free || same) && !o.apart {
		return claim{name, at, same}, OK
	}
	if !o.apart && x.heldBy(other, k, target) {
		return claim{}, Contradiction
	}
	o.apart = true
	own := x.own(target, name)
	there, mine, m := x.search(own, x.names.hash(own))
	switch {
	case mine != nil && mine == r && m == i:
		return claim{key: own, done: true}, OK
	case mine != nil:
		return claim{}, Contradiction
	case same:
		return claim{key: name, done: true}, OK
	case free:
		at, _, _ = x.search(name, hash) // the other search may have changed the table
		return claim{key: name, at: at}, OK
	case x.heldBy(other, k, target):
		return claim{}, Contradiction
	}
	return claim{key: own, at: there}, OK
}

// heldBy reports whether a target holds a block in any tier, or is about to.
func (x *Index) heldBy(r *run, i int32, target int) bool {
	if r == x.work.run && i >= x.work.from && i < x.work.to {
		return true
	}
	v := r.view.Load()
	for t := range Tier(Tiers) {
		if setAt(v.tier(t), i).has(target) {
			return true
		}
		if v.slow == nil {
			break
		}
	}
	return false
}
