package exact

import "maps"

// Remove records that the target's engine has removed blocks from a tier. It returns how
// many of them the target did not hold there, as far as the index knows.
//
// A block that was stored several times is gone after as many removals. In the shared tier,
// one removal by any target removes the block for all.
func (x *Index) Remove(target int, t Tier, names []uint64) (unknown int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	before, owner := x.size(), x.owner(target)
	for _, name := range names {
		if at, b := x.known(name); b == nil || !x.remove(owner, target, t, at, b) {
			unknown++
		}
	}
	x.relieve(before) // other sets of holders take memory, too
	return unknown
}

// remove returns false if the target does not hold the block.
func (x *Index) remove(owner *owner, target int, t Tier, at place, b *block) bool {
	tier := x.sets.list[b.set].tier
	var to uint32
	switch {
	case t == Shared && len(tier[Shared]) == 0, t != Shared && !tier[t].has(target):
		return false
	case t == Shared:
		tier[Shared].each(func(target int) { x.owners[target].blocks[Shared]-- })
		tier[Shared] = nil
		to = x.sets.id(tier)
	case x.takeRepeat(owner.repeats, repeat{at, t}):
		return true
	default:
		owner.blocks[t]--
		to = x.sets.toggled(b.set, t, target)
	}
	if to != 0 {
		x.sets.assign(b, to)
		return true
	}
	x.dropNames(at)
	x.trim(at)
	return true
}

// takeRepeat counts one less of a block that the target has stored more than once.
func (x *Index) takeRepeat(repeats map[repeat]int32, key repeat) bool {
	n := repeats[key]
	if n > 1 {
		repeats[key] = n - 1
	} else if n == 1 {
		delete(repeats, key)
		x.bytes.repeats -= repeatBytes
	}
	return n > 0
}

// Clear records that the target's engine has lost all blocks, or that the number has a new
// owner. It takes effect at once, and visits no block. [Index.Step] reclaims the memory.
func (x *Index) Clear(target int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	o := x.owner(target)
	if o.blocks != [Tiers]int64{} {
		x.sets.drop(target)
		x.dirty = true
	}
	if x.sharing.has(target) {
		x.sharing = x.sharing.toggled(nil, target)
	}
	x.bytes.repeats -= int64(len(o.repeats)) * repeatBytes
	*o = owner{}
}

// trim drops the blocks at the end of a run that have no names, and that no run continues. If
// none is left, the run goes, and trim looks at the run above.
func (x *Index) trim(at place) {
	for at != 0 {
		r := x.run(at)
		first, n := r.start(), len(r.blocks)
		x.bytes.blocks -= r.bytes()
		for n > 0 && r.blocks[n-1].set == 0 && r.blocks[n-1].kids == 0 {
			n--
		}
		if n > 0 {
			if r.blocks, r.hashes = r.blocks[:n], r.hashes[:n]; n*2 <= cap(r.blocks) {
				r.blocks = append(make([]block, 0, n), r.blocks...)
				r.hashes = append(make([]uint64, 0, n), r.hashes...)
			}
			x.bytes.blocks += r.bytes()
			return
		}
		x.runs[r.id] = nil
		x.free = append(x.free, r.id)
		delete(x.starts, first)
		x.thin()
		if at = r.up; at != 0 {
			x.block(at).kids--
		}
	}
}

// thin makes a smaller map of starts if most of its memory is free.
func (x *Index) thin() {
	if n := len(x.starts); x.most > 64 && n*4 < x.most {
		to := make(map[start]*run, n)
		maps.Copy(to, x.starts)
		x.starts, x.most = to, n
	}
}
