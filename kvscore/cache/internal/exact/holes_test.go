package exact

import (
	"slices"
	"testing"
)

// TestHoles has the cases in which other indexes were found wrong, with the truth in each.
func TestHoles(t *testing.T) {
	const n = 1024
	chain := chainOf(1, n)
	ours, theirs := namesOf(1, chain), namesOf(2, chain)
	full := func(targets ...int) *Index {
		x := New(1 << 30)
		for _, target := range targets {
			feed(x, target, chain, ours, 64)
		}
		return x
	}
	reversed := func(names []uint64) []uint64 {
		names = slices.Clone(names)
		slices.Reverse(names)
		return names
	}
	for _, c := range []struct {
		name string
		x    func() *Index
		want []int32
	}{
		{"Whole", func() *Index { return full(0, 1) }, []int32{n, n}},
		{"MiddleEvicted", func() *Index {
			x := full(0, 1)
			x.Remove(0, Device, ours[500:501])
			return x
		}, []int32{500, n}},
		{"MiddleRestored", func() *Index {
			x := full(0, 1)
			x.Remove(0, Device, ours[500:501])
			x.Store(&Stored{HasParent: true, Parent: ours[499], Names: ours[500:501], Blocks: chain[500:501]})
			return x
		}, []int32{n, n}},
		{"OtherHalves", func() *Index {
			x := full(0, 1)
			other := append(slices.Clone(chain[:512]), 1, 2, 3)
			feed(x, 2, other, namesOf(1, other), 64) // divides the run
			x.Remove(1, Device, ours[:512])
			x.Remove(0, Device, reversed(ours[512:]))
			return x
		}, []int32{512, 0, 512}},
		{"HeadFirst", func() *Index {
			x := full(0, 1)
			x.Remove(0, Device, ours[:700])
			return x
		}, []int32{0, n}},
		{"HeadFirstThenRestored", func() *Index {
			x := full(0)
			x.Remove(0, Device, ours[:700])
			feed(x, 0, chain[:700], ours, 64)
			return x
		}, []int32{n}},
		{"HeadFirstForAll", func() *Index {
			x := full(0, 1)
			x.Remove(0, Device, ours[:700])
			x.Remove(1, Device, ours[:100])
			for x.Step(100) {
			}
			feed(x, 1, chain[:100], ours, 1)
			return x
		}, []int32{0, n}},
		{"OtherNames", func() *Index {
			x := full(0)
			feed(x, 1, chain, theirs, 64)
			return x
		}, []int32{n, n}},
		{"OtherNamesEvicted", func() *Index {
			x := full(0)
			feed(x, 1, chain, theirs, 64)
			x.Remove(1, Device, reversed(theirs))
			return x
		}, []int32{n, 0}},
		{"FirstNamesEvicted", func() *Index {
			x := full(0)
			feed(x, 1, chain, theirs, 64)
			x.Remove(0, Device, reversed(ours))
			x.Remove(1, Device, theirs[900:])
			return x
		}, []int32{0, 900}},
		{"AllEvicted", func() *Index {
			x := full(0, 1)
			x.Remove(0, Device, reversed(ours))
			x.Remove(1, Device, ours)
			return x
		}, []int32{0, 0}},
		{"StoredTwice", func() *Index {
			x := full(0)
			x.Store(&Stored{HasParent: true, Parent: ours[1022], Names: ours[1023:], Blocks: chain[1023:]})
			x.Remove(0, Device, ours[1023:])
			return x
		}, []int32{n}},
		{"StoredTwiceRemovedTwice", func() *Index {
			x := full(0)
			x.Store(&Stored{HasParent: true, Parent: ours[1022], Names: ours[1023:], Blocks: chain[1023:]})
			x.Remove(0, Device, ours[1023:])
			x.Remove(0, Device, ours[1023:])
			return x
		}, []int32{1023}},
		{"AnnouncedAgain", func() *Index {
			x := full(0)
			x.Store(&Stored{Root: 1, Names: ours, Blocks: chain})
			x.Remove(0, Device, ours[1000:])
			return x
		}, []int32{1000}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := c.x()
			x.check(t)
			var m Match
			x.Match(1, chain, &m)
			if !slices.Equal(m.Depth[Device], c.want) {
				t.Errorf("depths %v, want %v", m.Depth[Device], c.want)
			}
			for target := range c.want {
				if x.Incomplete(target) {
					t.Errorf("target %d is incomplete", target)
				}
			}
			var names []uint64
			x.walk(func(h held) { names = append(names, h.name) })
			for target := range c.want {
				x.Remove(target, Device, names)
				x.Remove(target, Device, names)
			}
			for x.Step(100) {
			}
			x.check(t)
			if x.Distinct() != 0 || x.Bytes() > New(0).Bytes()+5000 {
				t.Errorf("after all was evicted, %d blocks are left in %d bytes", x.Distinct(), x.Bytes())
			}
		})
	}
}

// TestTiers follows SGLang with a host cache: stored on the device, copied to the host,
// removed from the device, loaded back.
func TestTiers(t *testing.T) {
	chain := chainOf(1, 10)
	names := namesOf(1, chain)
	x := New(1 << 30)
	depths := func(target int, want ...int32) {
		t.Helper()
		var m Match
		x.Match(1, chain, &m)
		for tier := range Tier(Tiers) {
			if got := m.Depth[tier][target]; got != want[tier] {
				t.Errorf("target %d, tier %d: depth %d, want %d", target, tier, got, want[tier])
			}
		}
	}
	feed(x, 0, chain, names, 4)
	depths(0, 10, 10, 10, 10)
	if _, o := x.Store(&Stored{Tier: Host, Names: names[2:8]}); o != OK {
		t.Fatalf("outcome %d", o)
	}
	x.Remove(0, Device, names[3:6])
	depths(0, 3, 10, 10, 10)
	x.Remove(0, Device, names[8:])
	depths(0, 3, 8, 8, 8)
	x.Store(&Stored{HasParent: true, Parent: names[2], Names: names[3:6], Blocks: chain[3:6]})
	depths(0, 8, 8, 8, 8)
	x.Remove(0, Host, names)
	depths(0, 8, 8, 8, 8)

	// Target 1 stores the end in the shared tier. Target 0 does not share yet.
	x.Store(&Stored{Target: 1, Tier: Shared, Root: 1, Names: names, Blocks: chain})
	depths(1, 0, 0, 0, 10)
	depths(0, 8, 8, 8, 8)
	x.Store(&Stored{Target: 0, Tier: Shared, Names: names[:1]})
	depths(0, 8, 8, 8, 10)
	x.Remove(0, Shared, names[9:])
	depths(0, 8, 8, 8, 9)
	depths(1, 0, 0, 0, 9)
	x.Clear(0)
	depths(0, 0, 0, 0, 0)
	depths(1, 0, 0, 0, 9)
	x.check(t)
}

// TestContradiction has an engine that forgets the salt in its names, as SGLang does.
func TestContradiction(t *testing.T) {
	chain := chainOf(1, 100)
	names := namesOf(1, chain)
	var m Match
	for _, rooted := range []bool{true, false} {
		x := New(1 << 30)
		x.Store(&Stored{Root: 1, Names: names[:50], Blocks: chain[:50]})
		x.Store(&Stored{Target: 1, Root: 1, Names: names[:50], Blocks: chain[:50]})
		if n, o := x.Store(&Stored{Root: 2, Names: names[:50], Blocks: chain[:50]}); o != Contradiction || n != 0 {
			t.Fatalf("stored %d, outcome %d", n, o)
		}
		s := &Stored{HasParent: true, Parent: names[49], Names: names[50:], Blocks: chain[50:]}
		if rooted {
			s.Root = 2
		}
		if _, o := x.Store(s); o != Contradiction {
			t.Fatalf("the parent is of another chain, but the outcome is %d", o)
		}
		if !x.Incomplete(0) || x.Incomplete(1) {
			t.Errorf("incomplete: %v and %v", x.Incomplete(0), x.Incomplete(1))
		}
		x.Match(1, chain, &m)
		if m.Depth[Device][0] != 50 || m.Depth[Device][1] != 50 {
			t.Errorf("depths %v", m.Depth[Device])
		}
		x.Remove(0, Device, names[30:50])
		x.Match(1, chain, &m)
		if m.Depth[Device][0] != 30 || m.Depth[Device][1] != 50 {
			t.Errorf("depths %v", m.Depth[Device])
		}
		x.check(t)
	}
}

// TestClearedNumberIsReused expects nothing of the number's first owner.
func TestClearedNumberIsReused(t *testing.T) {
	x := New(1 << 30)
	chain := chainOf(1, 600)
	names := namesOf(1, chain)
	var m Match
	for range 5 {
		feed(x, 70, chain, names, 64)
		feed(x, 3, chain[:300], names, 64)
		x.Clear(70)
		x.Match(1, chain, &m)
		if m.Depth[Device][70] != 0 || m.Depth[Device][3] != 300 || x.Blocks(70, Device) != 0 {
			t.Fatalf("depths %d and %d", m.Depth[Device][70], m.Depth[Device][3])
		}
		feed(x, 70, chain[:10], names, 64)
		x.Match(1, chain, &m)
		if m.Depth[Device][70] != 10 {
			t.Fatalf("depth %d", m.Depth[Device][70])
		}
		x.check(t)
	}
}
