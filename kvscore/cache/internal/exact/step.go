package exact

// Step does a part of the work in the background. It evicts after the memory was lowered, and
// reclaims memory after [Index.Clear]. work bounds the blocks and runs that it changes; 1000
// take less than a millisecond. It reports whether more is left. The owner calls it regularly.
func (x *Index) Step(work int) (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for work > 0 && x.size() > x.bound {
		n := x.evictOne()
		if n == 0 {
			break
		}
		work -= n
	}
	for work > 0 && (x.dirty || x.sweep > 0) {
		if x.sweep == 0 {
			x.dirty = false
		}
		if x.sweep++; x.sweep >= len(x.runs) {
			x.sweep = 0
			continue
		}
		work--
		if r := x.runs[x.sweep]; r != nil {
			work -= x.reclaim(r)
		}
	}
	if len(x.free) > 0 && len(x.free) == len(x.runs)-1 { // all are gone
		x.reset()
	}
	return x.dirty || x.sweep > 0 || work <= 0 && x.size() > x.bound
}

// reclaim takes the names of blocks that only cleared targets held. It returns the work.
func (x *Index) reclaim(r *run) int {
	work := len(r.blocks) / 8
	for i := range r.blocks {
		if b := &r.blocks[i]; b.set != 0 && x.sets.list[b.set].empty() {
			x.dropNames(r.at(i))
			work++
		}
	}
	x.trim(r.at(0))
	return work
}

// relieve evicts what a call has added, until the index is within its memory, or empty. What a
// lower bound leaves is for Step.
func (x *Index) relieve(before int64) {
	for x.size() > max(x.bound, before) && x.evictOne() > 0 {
	}
}

// evictOne evicts the end of a run that no event has touched since the last round, as far as no
// run continues it. It returns the work, 0 if there is nothing left to evict.
func (x *Index) evictOne() int {
	for work := 1; work <= 3*len(x.runs); work++ {
		if x.hand++; x.hand >= len(x.runs) {
			x.hand = 0
		}
		r := x.runs[x.hand]
		if r == nil {
			continue
		}
		if r.hot {
			r.hot = false
			continue
		}
		from := len(r.blocks)
		for from > 0 && r.blocks[from-1].kids == 0 {
			from--
		}
		if n := len(r.blocks); from < n {
			for i := from; i < n; i++ {
				x.evict(r.at(i))
			}
			x.trim(r.at(0))
			return work + n
		}
	}
	return 0
}

// evict takes a block from its holders, which are incomplete then.
func (x *Index) evict(at place) {
	for t, holders := range x.sets.list[x.block(at).set].tier {
		holders.each(func(target int) {
			o := &x.owners[target]
			o.blocks[t]--
			o.incomplete = true
			before := len(o.repeats)
			delete(o.repeats, repeat{at, Tier(t)}) //nolint:gosec // a tier
			x.bytes.repeats -= int64(before-len(o.repeats)) * repeatBytes
		})
	}
	x.dropNames(at)
}
