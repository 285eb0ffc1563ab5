package approx

// demand is the memory that a call is about to take.
type demand struct {
	runs, holds int
	hashes      int64 // bytes
}

func (x *Index) cost(d demand) int64 {
	return d.hashes + x.runs.growth(d.runs) + x.holds.growth(d.holds) + x.table.growth(d.runs)
}

// hashCost returns an upper bound of the memory for n hashes. The allocator's size classes
// waste at most a quarter, and above 32 KiB less than a page of 8 KiB.
func hashCost(n int) int64 {
	b := int64(n) * 8
	return b + min(b/4, 8192) + 16
}

// hashSize returns the allocated memory of hashes: append rounds the capacity up to the
// allocator's sizes. A single hash shares 16 bytes with others that may outlive it.
func hashSize(hashes []uint64) int64 { return max(int64(cap(hashes))*8, 16) }

// room evicts what was used longest ago on any slot until there is memory for the demand, as
// far as the work allows. It reports whether there is memory, and whether it evicted or
// moved anything. After that, numbers of unpinned runs and of holds are invalid.
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

// reclaim does a piece of the work that gives memory back. It reports whether there was any.
func (x *Index) reclaim(bytes int64) bool {
	// Evicted records leave holes in pages. Only moving the other records together gives
	// that memory back, which is worth it for a large share.
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

// empty frees all records. None may be in use.
func (x *Index) empty() {
	x.runs.reset()
	x.holds.reset()
	x.table.reset()
}

// evictOldest removes blocks from the hold touched longest ago on any slot: enough for the
// given bytes if it has them.
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
	if others >= h.n { // other holds keep its blocks, so cutting it frees no hashes
		x.cut(oldest, h.n)
		return true
	}
	// At least a quarter: trim then copies the rest, which must be rare.
	n := max((bytes+7)/8, int64(h.n)/4+1)
	x.cut(oldest, int32(min(n, int64(h.n-others))))
	return true
}

// roomTokens returns how many of the blocks of the given weight the slot has room for, if it
// evicts everything that is not in use. It begins to evict from the end of the slot's
// order. Later calls do what the work does not allow.
func (x *Index) roomTokens(s *slot, blocks int, weight int32) int {
	if s.capacity == 0 || weight == 0 {
		return blocks
	}
	w := int64(weight)
	n := min(int64(blocks), max(s.capacity-s.inUse, 0)/w)
	x.catchUp(s, n*w)
	return int(n)
}

// catchUp removes blocks from the end of the slot's order until it has room for need more
// milli-tokens, as far as the work allows. A cleared slot loses all.
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

// evictable returns the slot's least recently used hold that is not in use, or 0. It parks
// the holds in use that it meets, so that later calls do not meet them.
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

// cut removes the last n blocks from a hold that is not in use.
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

// remove removes a hold without refs, and the run if that was its last hold.
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

// longest returns the blocks of the run's longest hold, ignoring the given one.
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

// trim cuts a run to the blocks that are still held. It drops the arrivals and the count at
// the former end. It copies the hashes only if that saves enough memory.
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
