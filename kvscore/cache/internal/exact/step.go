package exact

// sweep is the state of the work in the background: rounds over all runs that take the columns of
// cleared targets out of all sets.
type sweep struct {
	next   int // the run that the round visits next
	leaves set // columns that no set has after the round
	hand   int // the run that eviction looks at next
}

// Step does a part of the work in the background. It evicts after the memory was lowered, and
// reclaims memory after [Index.Clear]. work bounds the blocks and records that it visits; 1000
// take less than a millisecond. It reports whether more is left. The owner calls it regularly.
func (x *Index) Step(work int) (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for work > 0 && x.bytes() > x.memory.bound {
		n := x.evictOne()
		if n == 0 {
			break
		}
		work -= n
	}
	s := &x.sweep
	for work > 0 && !x.dirty.isZero() {
		if s.next == 0 {
			s.leaves = x.dirty
		}
		if s.next < len(x.runs) {
			work -= 2
			if r := x.runs[s.next]; r != nil && x.normalise(r) {
				work -= len(r.names)
				x.tidy(r)
			}
			s.next++
			continue
		}
		s.next = 0
		x.reuse()
	}
	return !x.dirty.isZero() || work <= 0 && x.bytes() > x.memory.bound
}

// reuse frees the columns that no set has any more.
func (x *Index) reuse() {
	leaves := x.sweep.leaves
	leaves.each(leaves, func(column int) { x.freeColumns = append(x.freeColumns, column) })
	x.dirty = x.dirty.without(leaves)
	if len(x.freeRuns) == len(x.runs)-1 { // all are gone
		x.runs, x.freeRuns = []*run{nil}, nil
	}
}

// normalise takes the columns of cleared targets out of a run's sets. Blocks that nobody holds
// lose their names. It reports whether there were any.
func (x *Index) normalise(r *run) bool {
	if x.dirty.isZero() {
		return false
	}
	v, any := r.view.Load(), false
	for t := range Tier(Tiers) {
		old := v.tier(t)
		for i := range old {
			if old[i].overlaps(x.dirty) {
				n := int32(len(v.hashes))
				segments := x.edited(old, 0, n, func(s set, _, _ int32) set { return s.without(x.dirty) })
				x.show(r, v.hashes, t, segments)
				any = true
				break
			}
		}
	}
	if any {
		x.forgetUnheld(r, 0, int32(len(v.hashes)))
	}
	return any
}

// relieve evicts what a call has added, until the index is within its memory, or empty. What a
// lower bound leaves is for Step.
func (x *Index) relieve(before int64) {
	for x.bytes() > max(x.memory.bound, before) && x.evictOne() > 0 {
	}
}

// evictOne evicts the end of a run that no event has touched since the last round, as far as no
// run continues it. It returns the work, 0 if there is nothing left to evict.
func (x *Index) evictOne() int {
	s := &x.sweep
	for work := 1; work <= 3*len(x.runs); work++ {
		if s.hand++; s.hand >= len(x.runs) {
			s.hand = 0
		}
		r := x.runs[s.hand]
		if r == nil {
			continue
		}
		if r.hot {
			r.hot = false
			continue
		}
		if from := r.deepest(); int(from) < len(r.names) {
			work += len(r.names)
			x.evict(r, from)
			return work
		}
	}
	return 0
}

// evict drops the blocks of a run from one on. No run continues them.
func (x *Index) evict(r *run, from int32) {
	v := r.view.Load()
	n, columns := int32(len(v.hashes)), x.columns.Load()
	for t := range Tier(Tiers) {
		if len(v.tier(t)) == 0 {
			continue
		}
		segments := x.edited(v.tier(t), from, n, func(s set, from, end int32) set {
			s.each(columns.valid, func(column int) { x.lose(int(columns.target[column]), r, t, from, end) })
			return set{}
		})
		x.show(r, v.hashes, t, segments)
	}
	x.forget(r, from, n)
	x.tidy(r)
}

// lose takes blocks from a holder, which is then incomplete.
func (x *Index) lose(target int, r *run, t Tier, from, end int32) {
	o := &x.owners[target]
	o.blocks[t] -= int64(end - from)
	o.incomplete = true
	if len(o.repeats) == 0 {
		return
	}
	for i := from; i < end; i++ {
		if _, ok := o.repeats[repeat{r.at(i), t}]; ok {
			delete(o.repeats, repeat{r.at(i), t})
			x.memory.repeats -= repeatBytes
		}
	}
}
