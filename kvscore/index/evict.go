package index

// demand is memory about to be taken.
type demand struct {
	runs, holds int
	hashes      int64 // bytes
}

func (x *Index) cost(d demand) int64 {
	return d.hashes + x.runs.growth(d.runs) + x.holds.growth(d.holds) + x.table.growth(d.runs)
}

// hashCost bounds from above what the allocator takes for n hashes: its sizes
// waste at most a quarter, and above 32 KiB less than a page of 8 KiB.
func hashCost(n int) int64 {
	b := int64(n) * 8
	return b + min(b/4, 8192) + 16
}

// hashSize returns what the allocator gave for hashes: append rounds the
// capacity up to its sizes. A single one shares 16 bytes with others that may
// outlive it.
func hashSize(hashes []uint64) int64 { return max(int64(cap(hashes))*8, 16) }

// room forgets what was used longest ago, on whichever slot, until there is
// memory for the demand, as long as the work lasts. It reports whether there
// is, and whether anything was forgotten or moved, after which numbers of
// unpinned runs and of holds are void.
func (x *Index) room(d demand) (ok, changed bool) {
	for {
		over := x.Bytes() + x.cost(d) - x.limit
		if over <= 0 {
			return true, changed
		}
		if x.left <= 0 || !x.reclaim(over) {
			return false, changed
		}
		changed = true
	}
}

// reclaim does a piece of the work that gives memory back, and reports whether
// there was any.
func (x *Index) reclaim(bytes int64) bool {
	// Forgotten records leave holes in pages, which only moving the others
	// together gives back: worth it when it is a part of the whole.
	if x.runs.reclaimable()+x.holds.reclaimable() > x.memory/16 && x.drain() {
		return true
	}
	if x.evictOldest(bytes) || x.drain() {
		return true
	}
	if x.runs.count() > 0 || x.runs.live+x.holds.live == 0 {
		return false
	}
	x.empty()
	return true
}

// empty gives all records back when none is in use.
func (x *Index) empty() {
	x.runs.reset()
	x.holds.reset()
	x.table.reset()
}

// evictOldest takes blocks from the hold touched longest ago on any slot,
// enough for the bytes wanted if it has them.
func (x *Index) evictOldest(bytes int64) bool {
	var oldest uint32
	var touched uint64
	x.spend(len(x.slots) / 8)
	for i := range x.slots {
		s := &x.slots[i]
		id := x.evictable(s)
		if id == 0 {
			continue
		}
		t := x.holds.at(id).touched
		if s.cleared {
			t = 0
		}
		if oldest == 0 || t < touched {
			oldest, touched = id, t
		}
	}
	if oldest == 0 {
		return false
	}
	h := x.holds.at(oldest)
	r := x.runs.at(h.run)
	others := x.longest(r, oldest)
	if others >= h.n { // its blocks stay for others; it would go whole, bit by bit
		x.cut(oldest, h.n)
		return true
	}
	// At least a quarter: that makes trim copy what is left, which must be rare.
	n := max((bytes+7)/8, int64(h.n)/4+1)
	x.cut(oldest, int32(min(n, int64(h.n-others))))
	return true
}

// roomTokens returns how many of so many blocks of a weight the slot can take
// in use: everything else makes room. It begins to forget that, from the end of
// the slot's order; what the work does not last for is forgotten later.
func (x *Index) roomTokens(s *slot, blocks int, weight int32) int {
	if s.capacity == 0 || weight == 0 {
		return blocks
	}
	w := int64(weight)
	n := min(int64(blocks), max(s.capacity-s.inUse, 0)/w)
	x.catchUp(s, n*w)
	return int(n)
}

// catchUp takes blocks from the end of the slot's order until it has room for
// so many milli-tokens more, as long as the work lasts. A cleared slot loses
// all.
func (x *Index) catchUp(s *slot, need int64) {
	for x.left > 0 && s.behind(need) {
		id := x.evictable(s)
		if id == 0 {
			return
		}
		h := x.holds.at(id)
		n := int64(h.n)
		if w := int64(x.runs.at(h.run).weight); w > 0 && !s.cleared {
			n = min(n, (s.used+need-s.capacity+w-1)/w)
		}
		x.cut(id, int32(n))
	}
}

func (s *slot) behind(need int64) bool {
	return s.cleared && s.lru.front != 0 || s.capacity > 0 && s.used+need > s.capacity
}

// evictable returns the slot's least recently used hold that is not in use, or
// 0. Those in use that it meets are parked, not to be met each time.
func (x *Index) evictable(s *slot) uint32 {
	for s.lru.back != 0 {
		id := s.lru.back
		h := x.holds.at(id)
		if h.refs == 0 {
			return id
		}
		x.park(s, id, h)
		x.spend(2)
	}
	return 0
}

// cut takes the last n blocks from a hold that is not in use.
func (x *Index) cut(id uint32, n int32) {
	h := x.holds.at(id)
	if n >= h.n {
		x.remove(id)
		return
	}
	r := x.runs.at(h.run)
	h.n -= n
	x.slots[h.slot].used -= int64(n) * int64(r.weight)
	x.trim(r)
}

// remove drops a hold without refs, and the run with its last hold.
func (x *Index) remove(id uint32) {
	h := x.holds.at(id)
	r := x.runs.at(h.run)
	x.spend(4)
	x.unlink(id, h)
	*x.holdLink(r, id) = h.next
	x.slots[h.slot].used -= int64(h.n) * int64(r.weight)
	rid := h.run
	x.holds.give(id)
	if r.holds != 0 {
		x.trim(r)
		return
	}
	x.table.drop(x.keyHash(r), rid)
	x.hashBytes -= hashSize(r.hashes)
	x.blocks -= int64(len(r.hashes))
	x.orphan(rid)
	x.runs.give(rid)
}

// longest returns the most blocks that any hold of the run has but one.
func (x *Index) longest(r *run, but uint32) int32 {
	n := int32(0)
	for i := r.holds; i != 0; {
		h := x.holds.at(i)
		if i != but {
			n = max(n, h.n)
		}
		x.spend(1)
		i = h.next
	}
	return n
}

// trim cuts a run to what is still held. The place where it ended is gone, and
// with it the arrivals there and the tokens of a prompt that ended there. Small remains are not copied for each block lost.
func (x *Index) trim(r *run) {
	n := int(x.longest(r, 0))
	if n == len(r.hashes) {
		return
	}
	x.blocks -= int64(len(r.hashes) - n)
	r.arrivals, r.count = 0, 0
	r.hashes = r.hashes[:n]
	if c := cap(r.hashes); c-n > n/4 {
		x.hashBytes -= hashSize(r.hashes)
		r.hashes = append([]uint64(nil), r.hashes...)
		x.hashBytes += hashSize(r.hashes)
		x.spend(n / copied)
	}
}
