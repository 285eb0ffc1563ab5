package exact

import "slices"

// sweep is the state of the work in the background. Rounds over all chunks reclaim what
// cleared targets have left, and join runs. Rounds over all aliases drop those of blocks that
// nobody holds, and cleared targets' own keys.
type sweep struct {
	dirty, clean uint64 // changes that need a round, and those that a round has followed
	begun        uint64 // dirty when the round began
	chunk        int    // next in the round
	aliased      uint64 // as dirty, for aliases
	aliasesClean uint64
	aliasesBegun uint64
	alias        int // next in the round, downwards; 0 begins one
	hand         int // next chunk that eviction looks at
}

// Step does a part of the work in the background. It evicts after the memory was lowered,
// reclaims memory after [Index.Clear], and joins runs. work bounds the blocks and records
// that it visits; 1000 take less than a millisecond. It reports whether more is left. The
// owner calls it regularly.
func (x *Index) Step(work int) (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for work > 0 && x.memory.limit > x.memory.bound {
		n := 0
		if x.bytes() > x.memory.bound {
			n = x.evictOne()
			work -= n
		}
		if x.memory.limit = max(x.memory.bound, x.bytes()); n == 0 {
			x.memory.limit = x.memory.bound
		}
	}
	work = x.sweepChunks(work)
	x.sweepAliases(work)
	s := &x.sweep
	return s.clean != s.dirty || s.aliasesClean != s.aliased || x.memory.limit > x.memory.bound
}

func (x *Index) sweepChunks(work int) int {
	s := &x.sweep
	for work > 0 && s.clean != s.dirty {
		if s.chunk == 0 {
			s.begun = s.dirty
		}
		if s.chunk >= len(x.chunks.pages)*chunkPage {
			s.chunk, s.clean = 0, s.begun
			continue
		}
		if x.chunks.pages[s.chunk/chunkPage] == nil {
			s.chunk = (s.chunk/chunkPage + 1) * chunkPage
			work--
			continue
		}
		work -= x.sweepChunk(uint32(s.chunk))
		s.chunk++
	}
	return work
}

// sweepChunk visits the runs of a chunk, and returns the work.
func (x *Index) sweepChunk(n uint32) int {
	work := 1
	k := x.chunks.get(n)
	for i := len(k.runs); i > 0; i-- {
		if i > len(k.runs) {
			continue // a run took others with it
		}
		r := k.runs[i-1]
		work += 2
		if r.view.Load().lags() {
			work += len(r.names)
		}
		x.tidy(r)
		if r.names != nil && r.view.Load().kids != nil {
			before := len(r.names)
			x.join(r)
			if after := len(r.names); after > before {
				work += after
			}
		}
	}
	return work
}

func (x *Index) sweepAliases(work int) {
	s, a := &x.sweep, &x.names.aliases
	for work > 0 && s.aliasesClean != s.aliased {
		if s.alias == 0 {
			s.aliasesBegun, s.alias = s.aliased, a.count+1
		}
		s.alias = min(s.alias, a.count+1) - 1
		if s.alias == 0 {
			s.aliasesClean = s.aliasesBegun
			continue
		}
		work--
		i := s.alias - 1
		if r, at := x.chunks.at(a.at(i).place()); r == nil || !x.holds(r, at) || x.over(a.at(i).tag()) {
			x.dropAlias(i, x.names.hash(a.at(i).name))
		}
	}
}

// relieve evicts until the index is within its memory, or empty.
func (x *Index) relieve() {
	for x.bytes() > x.memory.limit && x.evictOne() > 0 {
	}
	if x.bytes() > x.memory.limit && x.names.aliases.count > 0 { // all their blocks are gone
		x.sweep.aliased++
		x.sweepAliases(2 * (x.names.aliases.count + 1))
	}
}

// aliasesPerBlock is how many aliases the index visits for each block that it evicts. It
// bounds the share of aliases whose blocks are gone.
const aliasesPerBlock = 32

// evictOne evicts a run at the end of a chain that no event has touched since the last
// round. It returns the work, 0 if there is nothing left to evict.
func (x *Index) evictOne() int {
	work := 0
	for range 3*len(x.chunks.pages)*chunkPage + 1 {
		s := &x.sweep
		if s.hand >= len(x.chunks.pages)*chunkPage {
			s.hand = 0
		}
		work++
		p := x.chunks.pages[s.hand/chunkPage]
		if p == nil {
			s.hand = (s.hand/chunkPage + 1) * chunkPage
			continue
		}
		runs := p.chunks[s.hand%chunkPage].runs
		for _, r := range slices.Backward(runs) {
			if r.view.Load().kids != nil {
				continue
			}
			if r.hot {
				r.hot = false
				continue
			}
			work += len(r.names)
			x.sweepAliases(aliasesPerBlock * len(r.names))
			x.evict(r)
			return work
		}
		s.hand++
	}
	return 0
}

// evict drops a run that no run continues.
func (x *Index) evict(r *run) {
	v := r.view.Load()
	for t := range Tier(Tiers) {
		from := int32(0)
		for _, s := range v.tier(t) {
			if s.set != nil {
				x.loseAll(r, t, s.set, from, s.end)
			}
			from = s.end
		}
	}
	x.forget(r, 0, int32(len(v.hashes)))
	x.tidy(x.free(r))
}

// loseAll takes blocks from all holders, which are then incomplete.
func (x *Index) loseAll(r *run, t Tier, s *set, from, end int32) {
	s.each(func(target int) {
		o := &x.owners[target]
		o.blocks[t] -= int64(end - from)
		o.incomplete = true
		x.stats.Evicted += uint64(end - from)
		if o.repeats.count == 0 {
			return
		}
		before := o.repeats.bytes()
		for i := from; i < end; i++ {
			o.repeats.forget(repeatKey(r.place(i), t))
		}
		x.memory.repeats += o.repeats.bytes() - before
	})
}
