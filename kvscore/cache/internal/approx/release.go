package approx

// Release ends the use that Acquire began. The caller calls it exactly once for each Ref
// that Acquire returned. It ignores the zero Ref.
//
// keep says that the engine has computed the prompt: its blocks stay and become the most
// recently used. Without keep, Release removes the blocks that no request has confirmed or
// uses, and does not refresh the others. After an [Index.Clear] in between, it ignores
// keep, because the engine has lost the blocks.
func (x *Index) Release(ref Ref, keep bool) {
	if ref.run == 0 {
		return
	}
	x.begin()
	x.release(ref, keep)
	x.settle(&x.slots[ref.slot])
}

func (x *Index) release(ref Ref, keep bool) {
	if ref.run == 0 {
		return
	}
	s := &x.slots[ref.slot]
	keep = keep && !s.cleared
	refresh, walk := keep, maxWalk
	for id := ref.run; id != 0; {
		r := x.runs.at(id)
		id = r.parent // the run may be freed below
		hid, h := x.holdOf(r, ref.slot)
		x.spend(2)
		h.refs--
		if h.refs == 0 {
			s.inUse -= int64(h.n) * int64(r.weight)
		}
		h.confirmed = h.confirmed || keep
		switch {
		case refresh:
			x.refresh(s, hid, h)
		case h.refs > 0:
		case !h.confirmed:
			x.remove(hid)
		case h.parked && !x.unpark(s, hid, h, &walk):
			// Its place is too far away, so it becomes the most recent. All that is
			// above it must follow, because heads are evicted after tails.
			refresh = true
			x.refresh(s, hid, h)
		}
	}
	x.runs.unstick()
}

// refresh makes a hold the most recently used. The caller goes from the tail to the head, so
// that the head is more recent.
func (x *Index) refresh(s *slot, id uint32, h *hold) {
	x.clock++
	x.unlink(id, h)
	h.touched, h.parked = x.clock, false
	x.push(&s.lru, id)
}

// Clear records that the slot's engine has lost its cache, for example by a restart. The
// index removes what the slot holds (see [Index.Step]), and what is in use when it is
// released. The slot takes nothing new until it is [Index.Idle]. The owner should use
// another slot for the target until then.
func (x *Index) Clear(slot int) {
	s := x.slot(slot)
	if s == nil || s.idle() {
		return
	}
	s.cleared = true
	x.begin()
	x.catchUp(s, 0)
	x.settle(s)
	s.cleared = !s.idle()
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

// maxWalk bounds the search of Release for the places of holds in the order.
const maxWalk = 1024

// unpark puts a hold back at its place in the order, if the rest of the walk reaches it. It
// was at the old end when it was parked, so only other such holds can be older: the walk
// is short.
func (x *Index) unpark(s *slot, id uint32, h *hold, walk *int) bool {
	older, newer := uint32(0), s.lru.back
	for newer != 0 && x.before(x.holds.at(newer), h) {
		if *walk--; *walk < 0 {
			return false
		}
		x.spend(1)
		older, newer = newer, x.holds.at(newer).newer
	}
	x.unlink(id, h)
	h.parked = false
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
	return true
}

// before reports whether a is evicted before b. Only the halves of a split hold have equal
// touched values; the lower half goes first.
func (x *Index) before(a, b *hold) bool {
	if a.touched != b.touched {
		return a.touched < b.touched
	}
	return x.runs.at(a.run).start > x.runs.at(b.run).start
}
