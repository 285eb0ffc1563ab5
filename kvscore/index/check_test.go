package index

import "testing"

// check verifies everything that must be true between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	var hashBytes, blocks int64
	children := map[uint32]uint32{}
	runs, holds := 0, 0
	listed := map[uint32]bool{} // holds reached through runs
	used := make([]int64, len(x.slots))
	inUse := make([]int64, len(x.slots))
	inUseBlocks := make([]int64, len(x.slots))
	for id := uint32(1); int(id) < len(x.runs.pages)*page; id++ {
		r := x.runs.at(id)
		if !r.live() {
			continue
		}
		runs++
		hashBytes += hashSize(r.hashes)
		blocks += int64(len(r.hashes))
		if got := x.child(r.parent, r.root, r.hashes[0]); got != id {
			t.Fatalf("run %d is found as %d", id, got)
		}
		if r.parent != 0 {
			p := x.runs.at(r.parent)
			children[r.parent]++
			if !p.live() || p.root != r.root || p.start+int32(len(p.hashes)) != r.start {
				t.Fatalf("run %d: bad parent %d", id, r.parent)
			}
		} else if r.start != 0 {
			t.Fatalf("run %d: top at %d", id, r.start)
		}
		longest := int32(0)
		seen := map[uint16]bool{}
		for i := r.holds; i != 0; i = x.holds.at(i).next {
			h := x.holds.at(i)
			holds++
			listed[i] = true
			if h.run != id || seen[h.slot] || h.n <= 0 || int(h.n) > len(r.hashes) || h.refs < 0 {
				t.Fatalf("run %d: bad hold %d %+v", id, i, *h)
			}
			seen[h.slot] = true
			longest = max(longest, h.n)
			w := int64(h.n) * int64(r.weight)
			if h.resident {
				used[h.slot] += w
			}
			if h.refs > 0 {
				inUse[h.slot] += w
				inUseBlocks[h.slot] += int64(h.n)
				if int(h.n) != len(r.hashes) {
					t.Fatalf("run %d: hold %d in use in part", id, i)
				}
			} else if !h.resident || !h.confirmed || h.parked {
				t.Fatalf("run %d: hold %d not in use %+v", id, i, *h)
			}
			if r.parent == 0 {
				continue
			}
			p := x.runs.at(r.parent)
			_, ph := x.holdOf(p, h.slot)
			if ph == nil || int(ph.n) != len(p.hashes) || h.resident && !ph.resident ||
				ph.refs < h.refs || h.confirmed && !ph.confirmed {
				t.Fatalf("run %d: slot %d lacks the parent", id, h.slot)
			}
			if !h.parked && !ph.parked && !x.before(h, ph) {
				t.Fatalf("run %d: slot %d: head before tail", id, h.slot)
			}
		}
		if int(longest) != len(r.hashes) {
			t.Fatalf("run %d: longest hold %d of %d", id, longest, len(r.hashes))
		}
	}
	for id := uint32(1); int(id) < len(x.runs.pages)*page; id++ {
		if r := x.runs.at(id); r.live() && r.children != children[id] {
			t.Fatalf("run %d: children %d, want %d", id, r.children, children[id])
		}
	}
	if hashBytes != x.hashBytes || blocks != x.blocks || runs != x.runs.count() ||
		holds != x.holds.count() || runs != x.table.count {
		t.Fatalf("totals: %d/%d bytes, %d/%d blocks, %d/%d/%d runs, %d/%d holds", hashBytes, x.hashBytes,
			blocks, x.blocks, runs, x.runs.count(), x.table.count, holds, x.holds.count())
	}
	reached := 0
	for i := range x.slots {
		s := &x.slots[i]
		if s.used != used[i] || s.inUse != inUse[i] || s.inUseBlocks != inUseBlocks[i] {
			t.Fatalf("slot %d: used %d want %d, in use %d want %d, %d want %d blocks", i,
				s.used, used[i], s.inUse, inUse[i], s.inUseBlocks, inUseBlocks[i])
		}
		for k, l := range []list{s.lru, s.parked} {
			newer := uint32(0)
			for id := l.front; id != 0; id = x.holds.at(id).older {
				h := x.holds.at(id)
				if !listed[id] || int(h.slot) != i || h.newer != newer || h.parked != (k == 1) {
					t.Fatalf("slot %d: bad list at %d %+v", i, id, *h)
				}
				if k == 0 && newer != 0 && !x.before(h, x.holds.at(newer)) {
					t.Fatalf("slot %d: out of order at %d", i, id)
				}
				reached++
				newer = id
			}
			if l.back != newer {
				t.Fatalf("slot %d: back %d, want %d", i, l.back, newer)
			}
		}
	}
	if reached != holds {
		t.Fatalf("%d holds in slots' lists of %d", reached, holds)
	}
}
