package approx

import (
	"maps"
	"slices"
)

// Bounds of the holds that a call evicts.
const (
	roomEvictions   = 4096 // for what is needed at once
	settleEvictions = 128  // of what earlier calls have left
)

// hashBytes returns an upper bound of the memory for n hashes. The allocator's size classes
// waste at most a quarter, and above 32 KiB less than a page of 8 KiB.
func hashBytes(n int) int64 {
	b := int64(n) * 8
	return b + min(b/4, 8192) + 16
}

// hashSize returns the allocated memory of hashes: append rounds the capacity up to the
// allocator's sizes.
func hashSize(hashes []uint64) int64 { return int64(cap(hashes)) * 8 }

// room evicts what was used longest ago on any slot until there is memory for some bytes more,
// or until it has evicted much. It reports whether there is memory, and whether it evicted
// anything.
func (x *Index) room(bytes int64) (ok, evicted bool) {
	if bytes == 0 {
		return true, false
	}
	most := roomEvictions
	if x.bytes > x.memory { // the bound was lowered, and Step evicts
		most = settleEvictions
	}
	for range most {
		over := x.bytes + bytes - x.memory
		if over <= 0 {
			return true, evicted
		}
		if !x.evictOldest(over) {
			break
		}
		evicted = true
	}
	return x.bytes+bytes <= x.memory, evicted
}

// settle ends a call for a slot, or for none if s is nil. It does some of the work that is left.
func (x *Index) settle(s *slot) {
	if s != nil {
		x.catchUp(s, 0, settleEvictions)
	}
	x.shrink(settleEvictions)
}

// shrink brings the index below its bound. The reserve gives most chains room without work.
func (x *Index) shrink(evictions int) {
	for ; evictions > 0; evictions-- {
		if over := x.bytes - x.memory + x.memory/64; over <= 0 || !x.evictOldest(over) {
			break
		}
	}
}

// Step does a part of the work that a lower memory or capacity leaves. work is the number of
// holds to visit. It reports whether there may be more.
func (x *Index) Step(work int) (more bool) {
	work = max(work, 1)
	for _, s := range x.slots {
		x.catchUp(s, 0, work)
		more = more || s.behind(0) && !s.busy()
	}
	x.shrink(work)
	return more || x.bytes > x.memory && x.oldestHold() != nil
}

// oldestHold returns the hold touched longest ago on any slot that is not in use, or nil.
func (x *Index) oldestHold() (oldest *hold) {
	for _, s := range x.slots {
		if h := x.evictable(s); h != nil && (oldest == nil || h.touched < oldest.touched) {
			oldest = h
		}
	}
	return oldest
}

// evictOldest removes blocks from the hold touched longest ago on any slot: enough for the
// given bytes if it has them.
func (x *Index) evictOldest(bytes int64) bool {
	h := x.oldestHold()
	if h == nil {
		return false
	}
	others := h.run.longest(h)
	if others >= h.n { // other holds keep its blocks, so cutting it frees no hashes
		x.remove(h)
		return true
	}
	// At least a quarter: trim then copies the rest, which must be rare.
	n := max((bytes+7)/8, int64(h.n)/4+1)
	x.cut(h, int32(min(n, int64(h.n-others))))
	return true
}

// roomTokens returns how many of the blocks of the given weight the slot has room for, if it
// evicts everything that is not in use. It begins to evict from the end of the slot's
// order.
func (x *Index) roomTokens(s *slot, blocks int, weight int32) int {
	if s.capacity == 0 || weight == 0 {
		return blocks
	}
	w := int64(weight)
	n := min(int64(blocks), max(s.capacity-s.inUse.Load()+s.lost, 0)/w)
	x.catchUp(s, n*w, roomEvictions)
	return int(n)
}

// catchUp removes what the slot has forgotten. Then it removes blocks from the end of the slot's order
// until there is room for need more milli-tokens. It ends earlier if it has evicted much.
func (x *Index) catchUp(s *slot, need int64, evictions int) {
	for ; evictions > 0 && s.behind(need); evictions-- {
		h := x.evictable(s)
		switch {
		case h == nil:
			return
		case h.touched < s.forgets:
			x.remove(h)
		case s.over(need) > 0: // what is older is in use
			n := int64(h.n)
			if w := int64(h.run.weight); w > 0 {
				n = min(n, (s.over(need)+w-1)/w)
			}
			x.cut(h, int32(n))
		}
	}
}

// over returns how many milli-tokens the slot has no room for, if it needs some more.
func (s *slot) over(need int64) int64 {
	if s.capacity == 0 {
		return 0
	}
	return s.used.Load() + need - s.capacity
}

func (s *slot) behind(need int64) bool {
	return s.over(need) > 0 || s.back != nil && s.back.touched < s.forgets
}

// busy reports whether all that the slot holds is in use.
func (s *slot) busy() bool { return s.pinned == s.holds }

// evictable returns the slot's least recently used hold that is not in use, or nil. It makes
// the holds in use that it meets the most recently used, so that later calls do not meet them.
func (x *Index) evictable(s *slot) *hold {
	for start := x.clock; s.back != nil && s.back.touched <= start; {
		h := s.back
		if h.refs == 0 {
			return h
		}
		if s.busy() {
			return nil
		}
		x.refresh(s, h)
	}
	return nil
}

// cut removes the last n blocks from a hold that is not in use.
func (x *Index) cut(h *hold, n int32) {
	if n >= h.n {
		x.remove(h)
		return
	}
	r := h.run
	if !h.isPartial() {
		r.partial++
	}
	h.n -= n
	x.slots[h.slot].add(h, -int64(n)*int64(r.weight))
	x.trim(r)
}

// remove removes a hold without refs, and the run if that was its last hold.
func (x *Index) remove(h *hold) {
	r, s := h.run, x.slots[h.slot]
	s.unlink(h)
	s.holds--
	if !h.lost {
		s.add(h, -h.tokens())
	}
	if h.isPartial() {
		r.partial--
	}
	i, _ := r.find(h.slot)
	r.holds = slices.Delete(r.holds, i, i+1)
	h.run = nil
	x.bytes -= holdBytes
	if len(r.holds) > 0 {
		x.trim(r)
		return
	}
	delete(x.runs, r.begin())
	x.bytes -= runBytes + hashSize(r.hashes)
	x.blocks -= int64(len(r.hashes))
	x.shrinkMap()
}

// shrinkMap makes a smaller map if most runs are gone: a map never shrinks by itself.
func (x *Index) shrinkMap() {
	const few = 1024
	if x.peak < few || len(x.runs) > x.peak/3 {
		return
	}
	runs := make(map[start]*run, len(x.runs))
	maps.Copy(runs, x.runs)
	x.runs, x.peak = runs, len(runs)
}

// longest returns the blocks of the run's longest hold, ignoring the given one.
func (r *run) longest(but *hold) int32 {
	n := int32(0)
	for _, h := range r.holds {
		if h != but {
			n = max(n, h.n)
		}
	}
	return n
}

// trim cuts a run to the blocks that are still held. It drops the arrivals and the count at
// the former end. It copies the hashes only if that saves enough memory.
func (x *Index) trim(r *run) {
	if int(r.partial) < len(r.holds) {
		return // a hold has all
	}
	n := int(r.longest(nil))
	if n == len(r.hashes) {
		return
	}
	x.blocks -= int64(len(r.hashes) - n)
	r.arrivals, r.count = 0, 0
	r.hashes = r.hashes[:n]
	if c := cap(r.hashes); c-n > n/4 {
		x.bytes -= hashSize(r.hashes)
		r.hashes = append([]uint64(nil), r.hashes...)
		x.bytes += hashSize(r.hashes)
	}
	r.partial = 0
	for _, h := range r.holds {
		if h.isPartial() {
			r.partial++
		}
	}
}
