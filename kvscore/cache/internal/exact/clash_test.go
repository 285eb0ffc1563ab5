package exact

import "testing"

// TestClashOfNames has two targets that give different blocks the same names: the second runs
// another version of the engine, or sends false events.
func TestClashOfNames(t *testing.T) {
	const n = 200
	chain, other := chainOf(1, n), chainOf(2, n)
	names := namesOf(1, chain)
	var m Match
	depth := func(x *Index, target int, of []uint64, want int32) {
		t.Helper()
		if x.Match(1, of, &m); len(m.Depth[Device]) <= target && want > 0 || len(m.Depth[Device]) > target && m.Depth[Device][target] != want {
			t.Errorf("target %d: depths %v, want %d", target, m.Depth[Device], want)
		}
		x.check(t)
	}
	x := New(1 << 30)
	feed(x, 0, chain, names, 64)
	for _, s := range []struct {
		s    Stored
		want Outcome
	}{
		{Stored{Root: 1, Names: names, Blocks: other}, Contradiction},
		{Stored{HasParent: true, Parent: names[9], Names: names[10:], Blocks: other[10:]}, UnknownParent},
		{Stored{HasParent: true, Parent: names[9], Root: 1, Names: []uint64{1}, Blocks: other[10:11]}, UnknownParent},
		{Stored{Tier: Host, Names: names[:10]}, UnknownName},
	} {
		s.s.Target = 1
		if got, o := x.Store(&s.s); got != 0 || o != s.want {
			t.Errorf("%d blocks, outcome %d, want %d", got, o, s.want)
		}
	}
	if unknown := x.Remove(1, Device, names); unknown != n || !x.Incomplete(1) || x.Incomplete(0) {
		t.Errorf("%d names unknown, incomplete %v and %v", unknown, x.Incomplete(0), x.Incomplete(1))
	}
	depth(x, 0, chain, n)
	depth(x, 1, chain, 0)
	depth(x, 1, other, 0)

	x.Clear(0) // the names are free
	x.Clear(1)
	feed(x, 1, other, names, 64)
	depth(x, 1, other, n)
	depth(x, 0, chain, 0)
}
