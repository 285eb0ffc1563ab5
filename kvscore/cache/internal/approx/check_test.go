package approx

import (
	"slices"
	"testing"
)

// check verifies everything that must be true between two calls.
func (x *Index) check(t testing.TB) {
	t.Helper()
	var bytes, blocks int64
	used, inUse := make([]int64, len(x.slots)), make([]int64, len(x.slots))
	holds, pinned := make([]int, len(x.slots)), make([]int, len(x.slots))
	for key, r := range x.runs {
		bytes += runBytes + hashSize(r.hashes) + int64(len(r.holds))*holdBytes
		blocks += int64(len(r.hashes))
		if r.begin() != key {
			t.Fatalf("a run has another key: %+v", *r)
		}
		if p := r.up; p != nil && (x.runs[p.begin()] != p || p.root != r.root || p.start+int32(len(p.hashes)) != r.start) || p == nil && r.start != 0 {
			t.Fatalf("a run at %d has a bad parent", r.start)
		}
		partial, runUsed := int32(0), int32(0)
		for i, h := range r.holds {
			if h.run != r || h.n <= 0 || int(h.n) > len(r.hashes) || h.refs < 0 || i > 0 && r.holds[i-1].slot >= h.slot {
				t.Fatalf("a bad hold: %+v", *h)
			}
			holds[h.slot]++
			if h.isPartial() {
				partial++
			}
			if !h.lost {
				used[h.slot] += h.tokens()
			}
			if h.refs > 0 {
				runUsed++
				pinned[h.slot]++
				inUse[h.slot] += h.tokens()
				if int(h.n) != len(r.hashes) {
					t.Fatalf("a hold is in use in part: %+v", *h)
				}
			} else if !h.confirmed || h.lost {
				t.Fatalf("a hold is not in use: %+v", *h)
			}
			if r.up == nil {
				continue
			}
			ph := r.up.hold(h.slot)
			if ph == nil || int(ph.n) != len(r.up.hashes) || ph.refs < h.refs || h.confirmed && !ph.confirmed && !h.lost || ph.lost && !h.lost {
				t.Fatalf("a hold lacks the parent's: %+v", *h)
			}
			if h.refs == 0 && ph.refs == 0 && h.touched >= ph.touched && ph.older != h {
				t.Fatalf("a head is older than its tail: %+v", *h)
			}
		}
		if partial != r.partial || runUsed != r.used {
			t.Fatalf("%d partial holds and %d used ones, counted %d and %d", partial, runUsed, r.partial, r.used)
		}
		if longest := r.longest(nil); int(longest) != len(r.hashes) {
			t.Fatalf("the longest hold has %d of %d", longest, len(r.hashes))
		}
	}
	if bytes != x.bytes || blocks != x.blocks {
		t.Fatalf("%d bytes, counted %d; %d blocks, counted %d", bytes, x.bytes, blocks, x.blocks)
	}
	for i, s := range x.slots {
		if s == nil {
			continue
		}
		if s.used.Load() != used[i] || s.inUse.Load() != inUse[i] || s.holds != holds[i] || s.pinned != pinned[i] {
			t.Fatalf("slot %d: used %d want %d, in use %d want %d, holds %d want %d, pinned %d want %d", i,
				s.used.Load(), used[i], s.inUse.Load(), inUse[i], s.holds, holds[i], s.pinned, pinned[i])
		}
		n, newer := 0, (*hold)(nil)
		var sums [ageGroups]int64
		for h := s.front; h != nil; h = h.older {
			if group := s.ages.group(h.age); group >= s.ages.n || newer != nil && group > s.ages.group(newer.age) {
				t.Fatalf("slot %d: a bad age at %+v", i, *h)
			} else if !h.lost {
				sums[group] += h.tokens()
			}
			if h.newer != newer || newer != nil && newer.touched < h.touched || int(h.slot) != i || !slices.Contains(h.run.holds, h) {
				t.Fatalf("slot %d: bad order at %+v", i, *h)
			}
			n, newer = n+1, h
		}
		if sums != s.ages.sums {
			t.Fatalf("slot %d: the ages have %v milli-tokens, want %v", i, s.ages.sums, sums)
		}
		if n != holds[i] || s.back != newer {
			t.Fatalf("slot %d: %d holds in its order, want %d", i, n, holds[i])
		}
	}
}
