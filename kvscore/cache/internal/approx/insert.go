package approx

import (
	"math"
	"sort"
)

// Acquire records that a prompt is sent to a slot. The slot holds its blocks from now on.
// They are in use until [Index.Release], which the caller must call exactly once with the
// returned Ref. Known blocks keep their weight.
//
// Acquire returns how many leading blocks it tracks. These are fewer than given if the
// slot's capacity or the memory has no room, or if making room takes too much work. It
// returns zero values for an empty chain, for a slot that was not declared, and for a
// cleared slot until that is [Index.Idle].
//
// It counts an arrival where the chain's match ended before (see [Match]), if there was a
// match and the tracked blocks reach its end.
func (x *Index) Acquire(slot int, c *Chain) (Ref, int) {
	x.begin()
	return x.AcquireMatched(slot, c, x.matched(c.Root, c.Blocks))
}

// AcquireMatched is Acquire for a chain that was just matched: matched is Match.Blocks. With -1
// it counts no arrival.
func (x *Index) AcquireMatched(slot int, c *Chain, matched int) (Ref, int) {
	s := x.open(slot)
	if s == nil {
		return Ref{}, 0
	}
	x.begin()
	ref, n := x.acquire(s, uint16(slot), c, matched)
	x.settle(s)
	return ref, n
}

// Touch records that the slot's engine has the whole chain, for example prompt and answer
// at the end of a request. It inserts what is missing and makes all of it the most recently
// used. tokens is the engine's count of the chain (see [Index.RecordCount]); 0 is unknown.
// The rest is as for Acquire.
func (x *Index) Touch(slot int, c *Chain, tokens int64) {
	s := x.open(slot)
	if s == nil {
		return
	}
	x.begin()
	ref, n := x.acquire(s, uint16(slot), c, -1)
	if n == len(c.Blocks) {
		x.recordCount(ref, c, tokens)
	}
	x.release(ref, true)
	x.settle(s)
}

// open returns a slot that can take new blocks, or nil.
func (x *Index) open(slot int) *slot {
	s := x.slot(slot)
	if s != nil && s.cleared {
		if !s.idle() {
			return nil
		}
		s.cleared = false
	}
	return s
}

// maxRuns bounds the runs of a chain: each call walks all of them.
const maxRuns = 4096

// acquire pins the chain run by run from the top. Pinned runs are safe from the evictions
// that make room for the rest. It counts an arrival at the end of the run that ends at the
// position arrival.
func (x *Index) acquire(s *slot, slot uint16, c *Chain, arrival int) (Ref, int) {
	root, blocks := c.Root, c.Blocks
	parent, pos := uint32(0), 0
	for depth := 0; pos < len(blocks) && depth < maxRuns; {
		id := x.child(parent, x.seedOf(parent), root, blocks[pos])
		x.spend(2)
		if id == 0 {
			rest := blocks[pos:]
			id = x.grow(s, slot, parent, root, rest, pos, clampWeight(c.Weights.Sum(rest)/int64(len(rest))))
			if id != 0 {
				parent = id
				pos += len(x.runs.at(id).hashes)
			}
			break
		}
		r := x.runs.at(id)
		same := Common(r.hashes, blocks[pos:])
		want := x.affordable(s, id, slot, same)
		if want == 0 {
			break
		}
		if d := x.pinDemand(id, slot, want); d != (demand{}) {
			if ok, changed := x.room(d); changed {
				continue // the run may be another now, or gone
			} else if !ok {
				break
			}
		}
		depth++
		if want < len(r.hashes) {
			id = x.split(id, want, &c.Weights)
		}
		x.pin(s, id, slot)
		parent = id
		pos += want
		if pos == arrival {
			r = x.runs.at(id)
			r.arrivals += min(1, math.MaxUint16-r.arrivals)
		}
	}
	if parent == 0 {
		return Ref{}, 0
	}
	return Ref{run: parent, slot: slot}, pos
}

// affordable returns how many of the run's first blocks the slot can pin in one step. If the
// slot holds a part of them, it is that part. Confirmed and new blocks must not share a
// hold, or a failed request could not be undone.
func (x *Index) affordable(s *slot, id uint32, slot uint16, blocks int) int {
	r := x.runs.at(id)
	if _, h := x.holdOf(r, slot); h != nil {
		return min(blocks, int(h.n))
	}
	return x.roomTokens(s, blocks, r.weight)
}

// pinDemand returns the memory that pinning the run's first blocks takes.
func (x *Index) pinDemand(id uint32, slot uint16, blocks int) demand {
	r := x.runs.at(id)
	var d demand
	if _, h := x.holdOf(r, slot); h == nil {
		d.holds = 1
	}
	if blocks == len(r.hashes) {
		return d
	}
	for i := r.holds; i != 0; i = x.holds.at(i).next {
		d.holds++
	}
	d.runs = 1
	d.hashes = hashCost(blocks) + hashCost(len(r.hashes)-blocks) - hashSize(r.hashes)
	return d
}

// grow adds a pinned run below parent with as many of the blocks as fit, and returns it; 0
// if none fits.
func (x *Index) grow(s *slot, slot uint16, parent uint32, root uint64, blocks []uint64, start int, weight int32) uint32 {
	n := x.roomTokens(s, len(blocks), weight)
	d := demand{runs: 1, holds: 1, hashes: hashCost(n)}
	if ok, _ := x.room(d); !ok {
		d.hashes = 0
		left := x.limit - x.Bytes() - x.cost(d)
		n = sort.Search(n, func(k int) bool { return hashCost(k+1) > left })
	}
	if n <= 0 {
		return 0
	}
	id, r := x.runs.take()
	*r = run{
		hashes: append([]uint64(nil), blocks[:n]...),
		root:   root, parent: parent, weight: weight, start: int32(start), seed: x.seed(),
	}
	x.hashBytes += hashSize(r.hashes)
	x.blocks += int64(n)
	x.spend(4 + n/copied)
	x.adopt(id)
	x.table.put(x.keyHash(r), id)
	x.pin(s, id, slot)
	return id
}

// pin takes the whole run for a request. The slot holds all of it or none.
func (x *Index) pin(s *slot, id uint32, slot uint16) {
	r := x.runs.at(id)
	n := int64(len(r.hashes))
	_, h := x.holdOf(r, slot)
	if h == nil {
		var hid uint32
		hid, h = x.holds.take()
		*h = hold{run: id, next: r.holds, n: int32(n), slot: slot, parked: true}
		r.holds = hid
		x.push(&s.parked, hid)
		s.used += n * int64(r.weight)
	}
	if h.refs == 0 {
		s.inUse += n * int64(r.weight)
	}
	h.refs++
}

func (x *Index) holdOf(r *run, slot uint16) (uint32, *hold) {
	for i := r.holds; i != 0; {
		h := x.holds.at(i)
		if h.slot == slot {
			return i, h
		}
		x.spend(1)
		i = h.next
	}
	return 0, nil
}

// split cuts a run in two and returns the new one, which is the upper. The lower one keeps
// its number, because Refs name the deepest run of their chain. Both get copies of the
// hashes, so that either can be freed. The kinds of the blocks divide the run's tokens.
func (x *Index) split(id uint32, at int, w *Weights) uint32 {
	low := x.runs.at(id)
	upper, lower := w.divide(low, at)
	up, r := x.runs.take()
	*r = run{
		hashes: append([]uint64(nil), low.hashes[:at]...),
		root:   low.root, parent: low.parent, weight: low.weight, start: low.start, seed: x.seed(),
	}
	x.spend(8 + len(low.hashes)/copied)
	x.table.replace(x.keyHash(low), id, up)
	x.orphan(id)
	x.adopt(up)
	x.hashBytes -= hashSize(low.hashes)
	low.hashes = append([]uint64(nil), low.hashes[at:]...)
	x.hashBytes += hashSize(low.hashes) + hashSize(r.hashes)
	low.parent = up
	low.start += int32(at)
	x.adopt(id)
	x.table.put(x.keyHash(low), id)

	i := low.holds
	low.holds = 0
	for i != 0 {
		h := x.holds.at(i)
		next := h.next
		x.spend(2)
		if int(h.n) <= at { // nothing left for the lower: move it
			h.run, h.next = up, r.holds
			r.holds = i
		} else {
			x.splitHold(i, h, up, int32(at))
			h.next = low.holds
			low.holds = i
		}
		i = next
	}
	r.weighed = low.weighed
	x.reweigh(up, upper)
	x.reweigh(id, lower)
	return up
}

// splitHold gives the upper run a copy of a hold. The copy follows the hold in the slot's
// list on the recent side, because tails are evicted before heads.
func (x *Index) splitHold(id uint32, h *hold, up uint32, at int32) {
	r := x.runs.at(up)
	cid, c := x.holds.take()
	*c = *h
	c.run, c.n, c.next = up, at, r.holds
	r.holds = cid
	h.n -= at

	c.older = id
	if h.newer != 0 {
		x.holds.at(h.newer).older = cid
	} else {
		x.listOf(h).front = cid
	}
	h.newer = cid
}
