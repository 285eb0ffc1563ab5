package approx

import "testing"

// check verifies everything that must be true between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	var hashBytes, blocks int64
	children := map[uint32]int{}
	checkSlab(t, &x.runs)
	checkSlab(t, &x.holds)
	x.checkTable(t)
	runs, holds := 0, 0
	listed := map[uint32]bool{} // holds reached through runs
	used := make([]int64, len(x.slots))
	inUse := make([]int64, len(x.slots))
	for id := uint32(1); int(id) < len(x.runs.pages)*page; id++ {
		if x.runs.pages[id/page] == nil || !x.runs.at(id).live() {
			continue
		}
		r := x.runs.at(id)
		runs++
		hashBytes += hashSize(r.hashes)
		blocks += int64(len(r.hashes))
		if got := x.child(r.parent, x.seedOf(r.parent), r.root, r.hashes[0]); got != id {
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
			used[h.slot] += w
			if h.refs > 0 {
				inUse[h.slot] += w
				if int(h.n) != len(r.hashes) {
					t.Fatalf("run %d: hold %d in use in part", id, i)
				}
			} else if !h.confirmed || h.parked {
				t.Fatalf("run %d: hold %d not in use %+v", id, i, *h)
			}
			if r.parent == 0 {
				continue
			}
			p := x.runs.at(r.parent)
			_, ph := x.holdOf(p, h.slot)
			if ph == nil || int(ph.n) != len(p.hashes) ||
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
		if x.runs.pages[id/page] == nil || !x.runs.at(id).live() {
			continue
		}
		n, prev := 0, uint32(0)
		for i := x.runs.at(id).child; i != 0; i = x.runs.at(i).next {
			if c := x.runs.at(i); c.parent != id || c.prev != prev {
				t.Fatalf("run %d: bad child %d", id, i)
			}
			n, prev = n+1, i
		}
		if n != children[id] {
			t.Fatalf("run %d: children %d, want %d", id, n, children[id])
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
		if s.used != used[i] || s.inUse != inUse[i] {
			t.Fatalf("slot %d: used %d want %d, in use %d want %d", i,
				s.used, used[i], s.inUse, inUse[i])
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

// checkSlab verifies that every page is in the list that it belongs to.
func checkSlab[T any, P record[T]](t testing.TB, s *slab[T, P]) {
	t.Helper()
	live, spare, unlisted := 0, 0, 0
	for n, p := range s.pages {
		if p == nil {
			continue
		}
		h := s.heads[n]
		used, free := 0, 0
		for i := range p {
			if P(&p[i]).live() || n == 0 && i == 0 {
				used++
			}
		}
		for i := h.free; i != 0; i = uint16(*P(&p[i-1]).link()) {
			free++
		}
		if used != int(h.used) || used+free != page {
			t.Fatalf("page %d: %d used, %d free, %+v", n, used, free, h)
		}
		live, spare = live+1, spare+free
		c := uint8(used / (page / 8))
		if h.stuck {
			c = map[bool]uint8{true: none, false: sticky}[c == full]
		}
		if h.class != c {
			t.Fatalf("page %d: %d used in class %d", n, used, h.class)
		}
		if c == none {
			unlisted++
		}
	}
	listed := unlisted
	for c, n := range s.lists {
		for prev := uint32(0); n != 0; prev, n = n, s.heads[n-1].next {
			if h := s.heads[n-1]; int(h.class) != c || h.prev != prev {
				t.Fatalf("page %d in list %d: %+v", n-1, c, h)
			}
			listed++
		}
	}
	if live != s.live || spare != s.spare || listed != live {
		t.Fatalf("%d pages want %d, %d spare want %d, %d listed", s.live, live, s.spare, spare, listed)
	}
}

func (x *Index) checkTable(t testing.TB) {
	t.Helper()
	tab := &x.table
	count, size, deepest := 0, int64(0), 0
	for i := 0; i < len(tab.dir); {
		s := tab.dir[i].segment
		n := 0
		for _, e := range s.entries {
			if e.run == 0 {
				continue
			}
			if n++; tab.segment(e.hash) != s {
				t.Fatalf("an entry is in another segment")
			}
		}
		if n != s.count {
			t.Fatalf("segment of %d entries, want %d", s.count, n)
		}
		if s.depth == tab.depth() {
			deepest++
		}
		count, size = count+n, size+int64(len(s.entries))*8+segmentHead
		i += 1 << (tab.depth() - s.depth)
	}
	if count != tab.count || size != tab.size || deepest != tab.deepest {
		t.Fatalf("table: %d entries want %d, %d bytes want %d, %d deepest want %d", tab.count, count, tab.size, size, tab.deepest, deepest)
	}
}
