package exact

import "math/bits"

// A target has keys of its own from when one of its names has led to a block that only others
// hold. The table has the own key instead of such a name. A search for a name of this target
// tries that key first. The keys end with [Index.Clear].

// ownKey returns the key of a target's own for a name. Only the index can compute it. It is
// another one after a Clear.
func (x *Index) ownKey(target int, name uint64) uint64 {
	return x.secret(uint64(target)<<32|uint64(x.owners[target].life), name)
}

// secret mixes two values. Target numbers are below MaxTargets.
func (x *Index) secret(who, name uint64) uint64 {
	hi, lo := bits.Mul64(name^x.names.k1, (x.names.k0^who*0x9e3779b97f4a7c15)|1)
	return hi ^ lo
}

// known returns the held block that a target's name leads to, or nil.
func (x *Index) known(target int, name uint64) (*run, int32) {
	if x.owners[target].ownNames {
		own := x.ownKey(target, name)
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
	at   spot   // of the key, if the key does not lead to the block already
	by   tag    // whose own key it is
	done bool   // the key leads to the block already
}

// claim finds what the table is to call block i of a run. r is nil for a block that nobody
// holds. It is a contradiction if the name leads to another block that the target holds.
func (x *Index) claim(target int, name uint64, hash uint32, r *run, i int32) (claim, Outcome) {
	at, other, k := x.search(name, hash)
	free, same := other == nil, other != nil && other == r && k == i
	o := &x.owners[target]
	if !o.ownNames {
		if free || same {
			return claim{key: name, at: at, done: same}, OK
		}
		if x.heldBy(other, k, target) {
			return claim{}, Contradiction
		}
		o.ownNames = true
	}
	own := x.ownKey(target, name)
	_, mine, m := x.search(own, x.names.hash(own))
	if mine != nil && mine == r && m == i {
		return claim{done: true}, OK
	}
	if mine != nil && x.heldBy(mine, m, target) || !free && !same && x.heldBy(other, k, target) {
		return claim{}, Contradiction
	}
	if mine != nil { // the target has removed that block, and others hold it
		x.release(own, mine, m)
	}
	c := claim{key: name, done: same}
	if !free && !same {
		c.key, c.by = own, tagOf(target, o.life)
	}
	c.at, _, _ = x.search(c.key, x.names.hash(c.key))
	return c, OK
}

// release takes an own key from a block that other targets hold. If it is the name that the
// run keeps, the block gets one that leads nobody to it.
func (x *Index) release(own uint64, r *run, i int32) {
	hash, ref := x.names.hash(own), uint64(r.place(i))
	if r.names[i] != own {
		b := x.names.table.of(hash)
		k, _, _, _ := x.lookup(own, b, hash) //nolint:dogsled // the slot has the alias
		x.dropAlias(int(b.slots[k]&refMask&^aliasFlag), hash)
		return
	}
	x.names.table.drop(hash, ref)
	r.names[i] = x.secret(MaxTargets<<32, ref)
	x.names.table.put(x.names.hash(r.names[i]), ref)
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

// tag says whose own key an alias is: the target plus 1 and the low bits of its life. It is 0
// for a name, which all targets may use.
type tag uint32

const lifeBits = 18

func tagOf(target int, life uint32) tag {
	return tag(target+1)<<lifeBits | tag(life&(1<<lifeBits-1))
}

// over reports whether the target of an own key has been cleared since.
func (x *Index) over(t tag) bool {
	if t == 0 {
		return false
	}
	target := int(t>>lifeBits) - 1
	return t != tagOf(target, x.owners[target].life)
}
