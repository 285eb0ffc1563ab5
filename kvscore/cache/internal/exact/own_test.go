package exact

import "testing"

func (x *Index) mustStore(t *testing.T, s *Stored, want Outcome) {
	t.Helper()
	if _, o := x.Store(s); o != want {
		t.Fatalf("stored %+v: outcome %d, want %d", s, o, want)
	}
	x.check(t)
}

func (x *Index) depth(target int, root uint64, blocks ...uint64) int32 {
	var m Match
	x.Match(root, blocks, &m)
	return m.Depth[Shared][target]
}

// one is a block at the top.
func one(target int, name, block uint64) *Stored {
	return &Stored{Target: target, Root: 1, Names: []uint64{name}, Blocks: []uint64{block}}
}

// TestParentOfOthers has names that lead to blocks which only another target holds.
func TestParentOfOthers(t *testing.T) {
	x := New(1 << 20)
	x.mustStore(t, &Stored{Root: 1, Names: []uint64{100, 101}, Blocks: []uint64{1, 2}}, OK)
	x.mustStore(t, &Stored{Target: 1, Root: 2, Names: []uint64{100}, Blocks: []uint64{3}}, OK)
	child := Stored{Target: 1, HasParent: true, Parent: 101, Names: []uint64{102}, Blocks: []uint64{4}}
	x.mustStore(t, &child, UnknownParent)
	x.mustStore(t, &Stored{Target: 1, Names: []uint64{101}}, UnknownName)
	child.Parent = 100
	x.mustStore(t, &child, OK)
	if a, b := x.depth(1, 1, 1, 2, 4), x.depth(1, 2, 3, 4); a != 0 || b != 2 || x.Blocks(1, Device) != 2 {
		t.Errorf("depths %d and %d", a, b)
	}
	if s := x.Stats(); s.Apart != 1 {
		t.Errorf("%+v", s)
	}
}

// TestOwnNameIsUsedAgain has a target that removes a block and gives its name to another. Other
// targets hold the first one, under another name or first under theirs.
func TestOwnNameIsUsedAgain(t *testing.T) {
	for _, first := range []int{1, 2} {
		x := New(1 << 20)
		x.mustStore(t, one(0, 100, 30), OK) // block 30 has the name
		x.mustStore(t, one(first, map[int]uint64{1: 100, 2: 200}[first], 10), OK)
		x.mustStore(t, one(3-first, map[int]uint64{1: 100, 2: 200}[3-first], 10), OK)
		if x.Remove(1, Device, []uint64{100}) != 0 {
			t.Fatal("the name is unknown")
		}
		x.mustStore(t, one(1, 100, 20), OK)
		if x.depth(1, 1, 10) != 0 || x.depth(2, 1, 10) != 1 || x.depth(1, 1, 20) != 1 || x.depth(0, 1, 30) != 1 {
			t.Errorf("target %d was first: wrong depths", first)
		}
		if x.Remove(2, Device, []uint64{200}) != 0 || x.Remove(1, Device, []uint64{100}) != 0 || x.Distinct() != 1 {
			t.Errorf("target %d was first: %d blocks are left", first, x.Distinct())
		}
		x.check(t)
	}
}

// TestOwnKeysEnd clears a target with own keys again and again, beside targets that stay.
func TestOwnKeysEnd(t *testing.T) {
	const n = 1000
	x := New(4 << 20)
	chain, foreign, apart := chainOf(1, n), chainOf(2, n), chainOf(3, n)
	names := namesOf(1, foreign)
	feed(x, 0, foreign, names, 64)           // has the names
	feed(x, 2, chain, namesOf(2, chain), 64) // holds what target 1 stores under them
	feed(x, 3, apart, namesOf(3, apart), 64) // has nothing to do with it
	for range 200 {
		feed(x, 1, chain, names, 64)
		if x.depth(1, 1, chain...) != n {
			t.Fatal("the chain is not held")
		}
		x.Clear(1)
		for x.Step(1000) {
		}
	}
	x.check(t)
	if s := x.Stats(); x.names.aliases.count != 0 || s.Evicted != 0 || x.Incomplete(3) || s.Apart != 200*n {
		t.Errorf("%d aliases are left, target 3 is incomplete: %v; %+v", x.names.aliases.count, x.Incomplete(3), s)
	}
}

// TestWhatEventsCostOthers has what the package's comment says that the events of one target
// cost another.
func TestWhatEventsCostOthers(t *testing.T) {
	x := New(1 << 20)
	for target := range 2 {
		s := one(target, 11, 10)
		s.Tier = Shared
		x.mustStore(t, s, OK)
	}
	if x.Remove(0, Shared, []uint64{11}) != 0 || x.depth(1, 1, 10) != 0 {
		t.Error("a removal from the shared tier leaves the block to others")
	}

	x = New(1 << 20)
	x.mustStore(t, one(0, 11, 10), OK)
	x.mustStore(t, one(1, 12, 10), OK)
	x.mustStore(t, one(0, 12, 20), Contradiction)
	if !x.Incomplete(0) || x.Incomplete(1) {
		t.Error("not the target of the refused event is incomplete")
	}
}
