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
		x.stats.UnknownRemovals += uint64(len(names))
		return len(names)
	}
	p := removal{target: target, tier: t}
	for _, name := range names {
		if !x.removeOne(&p, name) {
			unknown++
		}
	}
	x.flush(&p)
	x.relieve() // holes take memory, too
	x.stats.UnknownRemovals += uint64(unknown)
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
		if r, i = x.known(p.target, name); r == nil {
			return false
		}
	}
	if p.run == r && i >= p.from && i < p.to { // twice in one event
		x.flush(p)
		if r, i = x.known(p.target, name); r == nil {
			return false
		}
	}
	set := setAt(r.view.Load().tier(p.tier), i)
	switch {
	case p.tier == Shared:
		if set.empty() {
			return false
		}
	case !set.has(p.target):
		return false
	case x.takeRepeat(p, r.place(i)):
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

func (x *Index) takeRepeat(p *removal, at place) bool {
	r := &x.owners[p.target].repeats
	before := r.bytes()
	took := r.take(repeatKey(at, p.tier))
	x.memory.repeats += r.bytes() - before
	return took
}

// near tries the neighbours of the blocks that were removed last, which saves a search in
// the table. Somebody must hold the block: otherwise its name may be from before.
func (x *Index) near(p *removal, name uint64) (*run, int32) {
	r, from, to := p.run, p.from, p.to
	if r == nil {
		r, from, to = x.work.near.run, x.work.near.i, x.work.near.i
	}
	if r == nil || x.owners[p.target].ownNames {
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
	r := p.run
	e := edit{run: r, tier: p.tier, target: p.target, kind: drop}
	if p.tier == Shared {
		e.kind = dropAll
	}
	old := r.view.Load()
	v := &view{hashes: old.hashes, kids: old.kids, slow: old.slow}
	v.setDevice(old.device, false)
	v.set(p.tier, x.edited(&e, old.tier(p.tier), p.from, p.to))
	n := v.last()
	if v.kids == nil && n > 0 {
		v.hashes = v.hashes[:n]
	}
	x.show(r, v)
	x.owners[p.target].blocks[p.tier] -= e.n
	x.forgetUnheld(r, p.from, p.to)
	r.names = r.names[:len(v.hashes)]
	x.work.near = cursor{r, p.from}
	p.run = nil
	if n == 0 || room(len(v.hashes))*2 <= cap(v.hashes) || x.sweep.dirty != x.sweep.clean {
		x.tidy(r)
	}
}

// forgetUnheld drops the names of blocks that have no holder.
func (x *Index) forgetUnheld(r *run, from, to int32) {
	v := r.view.Load()
	for i := from; i < to; {
		held, end := v.held(i, to)
		if !held {
			x.forget(r, i, end)
		}
		i = end
	}
}

// tidy drops the blocks at the end of a run that have no holder, if no run continues it. If
// none is left, the run goes, and tidy looks at the run above.
func (x *Index) tidy(r *run) {
	for r != nil {
		x.normalise(r)
		v := r.view.Load()
		n := v.last()
		if v.kids != nil {
			return
		}
		if n > 0 {
			if int(n) == len(v.hashes) && room(int(n))*2 > cap(v.hashes) {
				return
			}
			w := &view{hashes: v.hashes[:n], slow: v.slow}
			w.setDevice(v.device, false)
			r.names = r.names[:n]
			x.shorten(r, w)
			x.show(r, w)
			return
		}
		r = x.free(r)
	}
}

// free drops a run that no run continues. It returns the run above, nil at the top.
func (x *Index) free(r *run) *run {
	v := r.view.Load()
	x.releaseAll(v)
	x.memory.runs -= runBytes + v.bytes() + storageBytes(v.hashes)
	r.names = nil
	up := x.detach(r)
	x.chunks.strike(r)
	return up
}

// Clear records that the target's engine has lost all blocks, or that the number has a new
// owner. It takes effect at once. [Index.Step] reclaims the memory.
func (x *Index) Clear(target int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if target < 0 || target >= len(x.owners) {
		return
	}
	w := &x.sharing[target/64]
	w.Store(w.Load() &^ (1 << (target % 64)))
	x.sets.clear(target)
	o := &x.owners[target]
	x.memory.repeats -= o.repeats.bytes()
	if o.ownNames {
		x.sweep.aliased++
	}
	*o = owner{life: o.life + 1}
	x.sweep.dirty++
}
