package exact

// Remove records that the target's engine has removed blocks from a tier. It returns how
// many of them the target did not hold there, as far as the index knows.
//
// A block that was stored several times is gone after as many removals. In the shared tier,
// one removal by any target removes the block for all.
func (x *Index) Remove(target int, t Tier, names []uint64) (unknown int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if target < 0 || target >= len(x.owners) || t >= Tiers {
		return len(names)
	}
	before := x.bytes()
	p := removal{target: target, tier: t}
	for _, name := range names {
		if !x.removeOne(&p, name) {
			unknown++
		}
	}
	x.flush(&p)
	x.relieve(before) // holes take memory, too
	return unknown
}

// removal collects blocks from up to of a run.
type removal struct {
	target   int
	tier     Tier
	run      *run
	from, to int32
}

func (x *Index) removeOne(p *removal, name uint64) bool {
	r, i := x.near(p, name)
	if r == nil {
		if r, i = x.known(name); r == nil {
			return false
		}
	}
	if p.run == r && i >= p.from && i < p.to { // twice in one event
		x.flush(p)
		if r, i = x.known(name); r == nil {
			return false
		}
	}
	set := setAt(r.view.Load().tier(p.tier), i)
	switch {
	case p.tier == Shared:
		if !set.overlaps(x.columns.Load().valid) {
			return false
		}
	case !set.has(x.owners[p.target].column):
		return false
	case x.takeRepeat(p, r.at(i)):
		return true
	}
	switch {
	case p.run == r && i == p.to:
		p.to++
	case p.run == r && i == p.from-1:
		p.from--
	default:
		x.flush(p)
		p.run, p.from, p.to = r, i, i+1
	}
	return true
}

// takeRepeat counts one less of a block that the target has stored more than once.
func (x *Index) takeRepeat(p *removal, at place) bool {
	repeats, key := x.owners[p.target].repeats, repeat{at, p.tier}
	n, ok := repeats[key]
	switch {
	case !ok:
	case n > 1:
		repeats[key] = n - 1
	default:
		delete(repeats, key)
		x.memory.repeats -= repeatBytes
	}
	return ok
}

// near tries the neighbours of the blocks that were removed last, which saves a search in
// the table. Somebody must hold the block: otherwise its name may be from before.
func (x *Index) near(p *removal, name uint64) (*run, int32) {
	r, from, to := p.run, p.from, p.to
	if r == nil {
		r, from, to = x.work.near.run, x.work.near.i, x.work.near.i
	}
	if r == nil {
		return nil, 0
	}
	for _, i := range [...]int32{to, from - 1} {
		if i >= 0 && int(i) < len(r.names) && r.names[i] == name && x.holds(r, i) {
			return r, i
		}
	}
	return nil, 0
}

// flush applies a removal.
func (x *Index) flush(p *removal) {
	if p.run == nil {
		return
	}
	r, owner := p.run, &x.owners[p.target]
	v := r.view.Load()
	segments := x.edited(v.tier(p.tier), p.from, p.to, func(held set, from, end int32) set {
		n := int64(end - from)
		if p.tier != Shared {
			if !held.has(owner.column) {
				return held
			}
			owner.blocks[p.tier] -= n
			return held.toggled(owner.column)
		}
		columns := x.columns.Load()
		held.each(columns.valid, func(column int) { x.owners[columns.target[column]].blocks[Shared] -= n })
		return set{}
	})
	x.show(r, v.hashes, p.tier, segments)
	x.forgetUnheld(r, p.from, p.to)
	x.work.near = cursor{r, p.from}
	p.run = nil
	if n := r.view.Load().last(); int(n) < len(v.hashes) {
		x.tidy(r)
	}
}
