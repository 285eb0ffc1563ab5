package index

// Release ends what Acquire began; it must be called exactly once for each Ref
// that Acquire returned. The zero Ref is ignored.
//
// With keep the engine computed the prompt: its blocks become the most recently
// used, and stay. Without keep it is unknown or untrue that it did: blocks that
// no request has confirmed and none uses any more are forgotten; those known
// from before stay as they were, not refreshed. After a [Index.Clear] in
// between, keep is ignored, because what the engine computed is lost.
func (x *Index) Release(ref Ref, keep bool) {
	if ref.run == 0 {
		return
	}
	x.refs--
	if x.stuckRefs--; x.stuckRefs <= 0 {
		x.stuck = 0
	}
	s := &x.slots[ref.slot]
	keep = keep && ref.epoch == s.epoch
	for id := ref.run; id != 0; {
		r := x.runs.at(id)
		id = r.parent // the run may be freed below
		hid, h := x.holdOf(r, ref.slot)
		h.refs--
		if h.refs == 0 {
			s.inUse -= int64(h.n) * int64(r.weight)
			s.inUseBlocks -= int64(h.n)
		}
		switch {
		case keep:
			// From the tail to the head, so that the head is more recent.
			h.confirmed = true
			x.clock++
			x.unlink(hid, h)
			h.touched, h.parked = x.clock, false
			x.push(&s.lru, hid)
		case h.refs > 0:
		case !h.confirmed:
			x.remove(hid)
		case h.parked:
			x.unpark(s, hid, h)
		}
	}
	x.roomTokens(s, 0)
	if x.Bytes() > x.memory {
		x.room(demand{})
	}
	x.settle()
}

// Clear records that the slot's engine lost its cache, as by a restart: the
// slot holds nothing any more. Blocks in use stay in InUse until released.
func (x *Index) Clear(slot int) {
	s := x.slot(slot)
	if s == nil {
		return
	}
	s.epoch++
	for id := s.lru.back; id != 0; { // tails before heads
		h := x.holds.at(id)
		next := h.newer
		if h.refs == 0 {
			x.remove(id)
		} else {
			x.park(s, id, h)
		}
		id = next
	}
	for id := s.parked.front; id != 0; {
		h := x.holds.at(id)
		h.confirmed, h.resident = false, false
		id = h.older
	}
	s.used = 0
	x.settle()
}

// settle gives records back when nothing is left; a page of each is kept, not
// to allocate for every request of an idle index.
func (x *Index) settle() {
	if x.runs.count() == 0 && len(x.runs.pages)+len(x.holds.pages) > 2 {
		x.compact()
	}
}

func (x *Index) listOf(h *hold) *list {
	if h.parked {
		return &x.slots[h.slot].parked
	}
	return &x.slots[h.slot].lru
}

func (x *Index) push(l *list, id uint32) {
	h := x.holds.at(id)
	h.newer, h.older = 0, l.front
	if l.front != 0 {
		x.holds.at(l.front).newer = id
	} else {
		l.back = id
	}
	l.front = id
}

func (x *Index) unlink(id uint32, h *hold) {
	l := x.listOf(h)
	if h.newer != 0 {
		x.holds.at(h.newer).older = h.older
	} else {
		l.front = h.older
	}
	if h.older != 0 {
		x.holds.at(h.older).newer = h.newer
	} else {
		l.back = h.newer
	}
}

// park takes a hold in use out of the order of eviction.
func (x *Index) park(s *slot, id uint32, h *hold) {
	x.unlink(id, h)
	h.parked = true
	x.push(&s.parked, id)
}

// unpark puts a hold back where it was in the order. It was at the old end when
// it was parked, so only others of its kind can be older: the walk is short.
func (x *Index) unpark(s *slot, id uint32, h *hold) {
	x.unlink(id, h)
	h.parked = false
	older, newer := uint32(0), s.lru.back
	for newer != 0 && x.before(x.holds.at(newer), h) {
		older, newer = newer, x.holds.at(newer).newer
	}
	h.older, h.newer = older, newer
	if older != 0 {
		x.holds.at(older).newer = id
	} else {
		s.lru.back = id
	}
	if newer != 0 {
		x.holds.at(newer).older = id
	} else {
		s.lru.front = id
	}
}

// before reports whether a is to be evicted before b. Only halves of a split
// hold were touched at the same time; of these the lower goes first.
func (x *Index) before(a, b *hold) bool {
	if a.touched != b.touched {
		return a.touched < b.touched
	}
	return x.runs.at(a.run).start > x.runs.at(b.run).start
}
