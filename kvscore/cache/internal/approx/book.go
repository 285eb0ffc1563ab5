package approx

import (
	"math"
	"slices"
)

// maxRuns bounds the runs of a chain: each call walks all of them.
const maxRuns = 4096

// Acquire records that a prompt is sent to a slot. The slot holds its blocks from now on.
// They are in use until [Index.Release], which the caller must call exactly once with the
// returned Ref. Known blocks keep their weight. matched is Match.Blocks of a recent match.
//
// Acquire returns how many leading blocks it tracks. These are fewer than given if the
// slot's capacity or the memory has no room. It returns zero values for an empty chain.
//
// It counts an arrival where the chain's match ended before (see [Match]), if there was a
// match and the tracked blocks reach its end. With a matched of -1 it counts none.
func (x *Index) Acquire(slot int, c *Chain, matched int) (Ref, int) {
	s := x.slots[slot]
	ref, n := x.acquire(s, uint16(slot), c, matched)
	x.settle(s)
	return ref, n
}

// Touch records that the slot's engine has the whole chain, for example prompt and answer
// at the end of a request. It inserts what is missing and makes all of it the most recently
// used. tokens is the engine's count of the chain (see [Index.RecordCount]); 0 is unknown.
// The rest is as for Acquire.
func (x *Index) Touch(slot int, c *Chain, tokens int64, matched int) {
	ref, n := x.Acquire(slot, c, matched)
	if n == len(c.Blocks) {
		x.RecordCount(ref, c, tokens)
	}
	x.Release(ref, true)
}

// acquire pins the chain run by run from the top. Pinned runs are safe from the evictions
// that make room for the rest. It counts an arrival at the end of the run that ends at the
// position arrival.
func (x *Index) acquire(s *slot, slot uint16, c *Chain, arrival int) (Ref, int) {
	var up *run
	var last Last
	pos, blocks := 0, c.Blocks
	for depth := 0; pos < len(blocks) && depth < maxRuns; depth++ {
		r := x.runs[start{up, c.Root, blocks[pos]}]
		if r == nil {
			rest := blocks[pos:]
			r = x.grow(s, up, c.Root, rest, pos, clampWeight(c.Weights.Sum(rest)/int64(len(rest))))
			if r != nil {
				x.pin(s, slot, r)
				up, pos = r, pos+len(r.hashes)
			}
			break
		}
		want := x.affordable(s, slot, r, Common(r.hashes, blocks[pos:]))
		if want == 0 {
			break
		}
		if ok, evicted := x.room(r.cost(slot, want)); !ok {
			break
		} else if evicted {
			continue // the run may be another now, or gone
		}
		if want < len(r.hashes) {
			r = x.split(r, want, &c.Weights)
		}
		if h := r.hold(slot); h != nil && !h.lost {
			last = Last{h.touched, s.newer(h) / 1000}
		}
		x.pin(s, slot, r)
		up, pos = r, pos+want
		if pos == arrival {
			r.arrivals += min(1, math.MaxUint16-r.arrivals)
		}
	}
	if up == nil {
		return Ref{}, 0
	}
	return Ref{run: up, slot: slot, last: last}, pos
}

// affordable returns how many of the run's first blocks the slot can pin in one step. If the
// slot holds a part of them, it is that part. Confirmed and new blocks must not share a
// hold, or a failed request could not be undone.
func (x *Index) affordable(s *slot, slot uint16, r *run, blocks int) int {
	if h := r.hold(slot); h != nil {
		return min(blocks, int(h.n))
	}
	return x.roomTokens(s, blocks, r.weight)
}

// cost returns the memory that pinning the run's first blocks takes.
func (r *run) cost(slot uint16, blocks int) (bytes int64) {
	if r.hold(slot) == nil {
		bytes = holdBytes
	}
	if blocks < len(r.hashes) {
		bytes += runBytes + int64(len(r.holds))*holdBytes +
			hashBytes(blocks) + hashBytes(len(r.hashes)-blocks) - hashSize(r.hashes)
	}
	return bytes
}

// grow adds a run with as many of the blocks as fit, and returns it; nil if none fits.
func (x *Index) grow(s *slot, up *run, root uint64, blocks []uint64, start int, weight int32) *run {
	n := x.roomTokens(s, len(blocks), weight)
	need := int64(runBytes + holdBytes)
	if ok, _ := x.room(need + hashBytes(n)); !ok {
		for n > 0 && x.bytes+need+hashBytes(n) > x.memory {
			n = n * 7 / 8
		}
	}
	if n <= 0 {
		return nil
	}
	r := &run{
		hashes: append([]uint64(nil), blocks[:n]...),
		root:   root, up: up, weight: weight, start: int32(start),
	}
	x.runs[r.begin()] = r
	x.peak = max(x.peak, len(x.runs))
	x.bytes += runBytes + hashSize(r.hashes)
	x.blocks += int64(n)
	return r
}

// pin takes the whole run for a request. The slot holds all of it or none.
func (x *Index) pin(s *slot, slot uint16, r *run) {
	h := r.hold(slot)
	if h == nil {
		h = &hold{run: r, n: int32(len(r.hashes)), slot: slot}
		r.insert(h)
		s.holds++
		x.bytes += holdBytes
		h.lost = true // so that push adds no tokens
		x.push(s, h)
		h.lost = false
		s.add(h, h.tokens())
	}
	if h.refs == 0 {
		s.pinned++
		s.inUse.Add(h.tokens())
		r.used++
	}
	if h.lost {
		h.lost, h.confirmed = false, false
		r.partial--
		s.add(h, h.tokens())
		s.lost -= h.tokens()
	}
	h.refs++
}

// tokens returns the milli-tokens of a hold.
func (h *hold) tokens() int64 { return int64(h.n) * int64(h.run.weight) }

// hold returns the slot's hold of the run, or nil.
func (r *run) hold(slot uint16) *hold {
	if i, ok := r.find(slot); ok {
		return r.holds[i]
	}
	return nil
}

// find returns the place of the slot's hold in the list, and whether it has one.
func (r *run) find(slot uint16) (int, bool) {
	return slices.BinarySearchFunc(r.holds, slot, func(h *hold, slot uint16) int { return int(h.slot) - int(slot) })
}

func (r *run) insert(h *hold) {
	i, _ := r.find(h.slot)
	r.holds = slices.Insert(r.holds, i, h)
	if h.refs > 0 {
		r.used++
	}
	if h.isPartial() {
		r.partial++
	}
}

func (h *hold) isPartial() bool { return h.lost || int(h.n) < len(h.run.hashes) }

// split cuts a run in two and returns the new one, which is the upper. The lower one stays the
// same record, because Refs name the deepest run of their chain. Both get copies of the
// hashes, so that either can be freed. The kinds of the blocks divide the run's tokens.
func (x *Index) split(low *run, at int, w *Weights) *run {
	upper, lower := w.divide(low, at)
	up := &run{
		hashes: append([]uint64(nil), low.hashes[:at]...), root: low.root, up: low.up,
		weight: low.weight, start: low.start, weighed: low.weighed,
	}
	x.runs[low.begin()] = up
	x.bytes += runBytes - hashSize(low.hashes)
	low.hashes = append([]uint64(nil), low.hashes[at:]...)
	x.bytes += hashSize(low.hashes) + hashSize(up.hashes)
	low.up = up
	low.start += int32(at)
	x.runs[low.begin()] = low

	holds := low.holds
	low.holds, low.partial, low.used = nil, 0, 0
	for _, h := range holds {
		if int(h.n) <= at { // nothing left for the lower: move it
			h.run = up
			up.insert(h)
			continue
		}
		x.splitHold(h, up, int32(at))
		low.insert(h)
	}
	x.reweigh(up, upper)
	x.reweigh(low, lower)
	return up
}

// splitHold gives the upper run a copy of a hold. The copy follows the hold in the slot's
// order on the recent side, because tails are evicted before heads.
func (x *Index) splitHold(h *hold, up *run, at int32) {
	c := new(hold)
	*c = *h
	c.run, c.n = up, at
	up.insert(c)
	h.n -= at
	s := x.slots[h.slot]
	if s.holds++; h.refs > 0 {
		s.pinned++
	}
	c.older = h
	if h.newer != nil {
		h.newer.older = c
	} else {
		s.front = c
	}
	h.newer = c
	x.bytes += holdBytes
}

// Release ends the use that Acquire began. The caller calls it exactly once for each Ref
// that Acquire returned. It ignores the zero Ref.
//
// keep says that the engine has computed the prompt, so that its blocks stay. Without keep,
// Release removes the blocks that no request has confirmed or uses. What stays is the most
// recently used. After an [Index.Clear] in between, keep must be false: the engine has lost the
// blocks.
func (x *Index) Release(ref Ref, keep bool) {
	if ref.run == nil {
		return
	}
	s := x.slots[ref.slot]
	for r := ref.run; r != nil; {
		up := r.up // the run may be freed below
		h := r.hold(ref.slot)
		if h.refs--; h.refs == 0 {
			s.pinned--
			s.inUse.Add(-h.tokens())
			if h.lost {
				s.lost -= h.tokens()
			}
			r.used--
		}
		h.confirmed = h.confirmed || keep
		if h.refs == 0 && (!h.confirmed || h.lost) {
			x.remove(h)
		} else { // from the tail to the head, so that the head is more recent
			x.refresh(s, h)
		}
		r = up
	}
	x.settle(s)
}

// Clear records that the slot's engine has lost its cache, for example by a restart. Nothing of
// it matches any more. What is in use is removed when it is released. A hold takes less than a
// microsecond.
func (x *Index) Clear(n int) {
	s := x.slots[n]
	for h := x.evictable(s); h != nil; h = x.evictable(s) {
		x.remove(h)
	}
	for h := s.front; h != nil; h = h.older {
		if !h.lost {
			h.run.partial++
			h.lost = true
		}
	}
	s.used.Store(0)
	s.ages.sums = [ageGroups]int64{}
	s.lost = s.inUse.Load()
}

// Forget removes what was touched before, on a slot: see [Index.Now]. What is in use stays. The rest
// goes in steps: see [Index.Step]. Forget reports whether there may be more.
func (x *Index) Forget(n int, before uint64) (more bool) {
	s := x.slots[n]
	s.forgets = max(s.forgets, before)
	x.settle(s)
	return s.behind(0) && !s.busy()
}

// refresh makes a hold the most recently used.
func (x *Index) refresh(s *slot, h *hold) {
	s.unlink(h)
	x.push(s, h)
}

func (x *Index) push(s *slot, h *hold) {
	x.clock++
	h.touched = x.clock
	s.renew(h)
	h.newer, h.older = nil, s.front
	if s.front != nil {
		s.front.newer = h
	} else {
		s.back = h
	}
	s.front = h
}

func (s *slot) unlink(h *hold) {
	if h.newer != nil {
		h.newer.older = h.older
	} else {
		s.front = h.older
	}
	if h.older != nil {
		h.older.newer = h.newer
	} else {
		s.back = h.newer
	}
}
