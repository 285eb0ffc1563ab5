package approx

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// read returns the chains of all slots, as a walk reads them.
func read(t testing.TB, x *Index) (all []Held) {
	t.Helper()
	var w Walk
	var b Batch
	for more := true; more; {
		more = w.Next(x, &b)
		for _, c := range b.Chains {
			if !c.Valid() {
				t.Fatalf("parts %v of %d blocks", c.Parts, len(c.Blocks))
			}
			c.Blocks, c.Parts = slices.Clone(c.Blocks), slices.Clone(c.Parts)
			all = append(all, c)
		}
	}
	return all
}

// busy returns an index after random work, without requests in flight.
func busy(t testing.TB, seed uint64) *world {
	rnd := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(4, 2, 14, rnd.IntN)
	for range 3000 {
		w.step(t)
	}
	for len(w.refs) > 0 {
		w.release(0, true)
	}
	return w
}

// copyOf returns a new index with the chains.
func copyOf(t testing.TB, x *Index, chains []Held) *Index {
	t.Helper()
	y := New(64 << 20)
	for i := range x.slots {
		y.SetCapacity(i, x.slots[i].capacity/1000)
	}
	for i := range chains {
		y.Restore(chains[i].Slot, &chains[i])
		y.check(t)
	}
	return y
}

// TestRestoredIndexIsTheSame compares an index with one made from its chains: matches, counts
// and the order of eviction.
func TestRestoredIndexIsTheSame(t *testing.T) {
	for seed := range uint64(8) {
		w := busy(t, seed)
		y := copyOf(t, w.x, read(t, w.x))
		var a, b Match
		same := func(when string) {
			t.Helper()
			for range 400 {
				root, blocks := w.chain()
				c := &Chain{Root: root, Blocks: blocks}
				w.x.Match(c, &a)
				y.Match(c, &b)
				if !slices.Equal(a.Held, b.Held) || a.Arrivals != b.Arrivals || a.Blocks != b.Blocks || !slices.Equal(a.Tokens, b.Tokens) {
					t.Fatalf("%s: %v: %+v, restored %+v", when, blocks, a, b)
				}
			}
		}
		same("restored")
		for i := range w.slots {
			if n := w.x.Used(i); n > 1 {
				w.x.SetCapacity(i, n/2)
				y.SetCapacity(i, n/2)
			}
		}
		same("after eviction")
	}
}

// TestWalkSurvivesChanges reads an index that changes between all steps. What is read must be
// held, and what nobody has touched must be read.
func TestWalkSurvivesChanges(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 5))
	x := declared(3)
	quiet := map[uint64]bool{}
	for i := range uint64(3000) {
		x.Touch(int(i%3), &Chain{Root: i, Blocks: seq(i*100, 5+i%20), Weights: Same(1000)}, 0)
		quiet[i] = i%10 != 0
	}
	var w Walk
	var b Batch
	seen := map[uint64]int{}
	for more := true; more; {
		more = w.Next(x, &b)
		for _, c := range b.Chains {
			seen[c.Root]++
		}
		for range 20 {
			i := uint64(rnd.IntN(300)) * 10
			x.Touch(int(i%3), &Chain{Root: i, Blocks: seq(i*100, 5+i%20+uint64(rnd.IntN(3))), Weights: Same(1000)}, 0)
		}
		x.check(t)
	}
	missed := 0
	for i, q := range quiet {
		if seen[i] == 0 && q {
			t.Errorf("chain %d was not read", i)
		} else if seen[i] == 0 {
			missed++
		}
	}
	if missed > 30 {
		t.Errorf("%d chains of 300 in use were not read", missed)
	}
}

func TestRestoreEvictsNothing(t *testing.T) {
	x := declared(1)
	x.SetCapacity(0, 20)
	x.Touch(0, &Chain{Root: 1, Blocks: seq(1, 15), Weights: Same(1000)}, 0)
	old := held(2, seq(100, 9), func(n int) int { return n / 2 })
	if !x.Restore(0, old) {
		t.Error("a slot with room takes nothing")
	}
	var m Match
	if x.Match(&Chain{Root: 1, Blocks: seq(1, 15)}, &m); m.Held[0] != 15 {
		t.Errorf("%d blocks of what was used last are left", m.Held[0])
	}
	x.Match(&Chain{Root: 2, Blocks: seq(100, 9)}, &m)
	if want := int32(20000-15000) / int32(weight(2)); m.Held[0] != want {
		t.Errorf("%d blocks are restored, want %d", m.Held[0], want)
	}
	x.check(t)
	for range 3 { // what is left of the capacity is less than a block
		x.Restore(0, held(3, seq(200, 2), func(n int) int { return 0 }))
	}
	if x.Match(&Chain{Root: 3, Blocks: seq(200, 2)}, &m); m.Held[0] != 0 || x.Used(0) > 20 {
		t.Errorf("%d blocks more than the slot has room for", m.Held[0])
	}
	if x.Restore(1, old) || x.Restore(-1, old) {
		t.Error("an unknown slot takes something")
	}
}

// TestWalkEndsIfAllThatItReadLastMoves touches the holds that a walk has read last, which it
// remembers to find its place.
func TestWalkEndsIfAllThatItReadLastMoves(t *testing.T) {
	x := New(64 << 20)
	x.SetCapacity(0, 0)
	chain := func(i int) *Chain {
		return &Chain{Root: uint64(i + 1), Blocks: []uint64{uint64(i+1) * 0x9e3779b97f4a7c15}, Weights: Same(16000)}
	}
	for i := range 2000 {
		x.Touch(0, chain(i), 0)
	}
	var w Walk
	var b Batch
	w.Next(x, &b)
	for k := range len(w.slots[0].last) {
		x.Touch(0, chain(2000-len(b.Chains)+k), 0)
	}
	for steps := 0; w.Next(x, &b); steps++ {
		if steps == 10_000 {
			t.Fatal("the walk does not end")
		}
	}
}
