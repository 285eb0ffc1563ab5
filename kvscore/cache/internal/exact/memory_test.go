package exact

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

// TestMemoryStaysWithinBound compares with a map of what engines hold: the index must never
// say more, and must say less only for incomplete targets.
func TestMemoryStaysWithinBound(t *testing.T) {
	for _, c := range []struct {
		long  int
		seeds uint64
	}{{3, 1}, {60, 1}, {3000, 1}, {200, 3}} {
		const bound, targets = 2 << 20, 6
		before := heap()
		x := New(bound)
		rnd := rand.New(rand.NewPCG(3, uint64(c.long)))
		held := [targets]map[uint64]int{} // by the first seed's names: they stand for content
		for i := range held {
			held[i] = map[uint64]int{}
		}
		var m Match
		for i, blocks := 0, 0; blocks < 1_000_000 && i < 30_000; i++ {
			chain := chainOf(uint64(rnd.IntN(5000)), 1+rnd.IntN(c.long))
			if rnd.IntN(2) == 0 {
				chain = append(chainOf(uint64(1e6)+uint64(rnd.IntN(10)), 40), chain...)
			}
			target := rnd.IntN(targets)
			names, content := namesOf(1+uint64(target)%c.seeds, chain), namesOf(1, chain)
			if rnd.IntN(4) == 0 {
				x.Remove(target, Device, names)
				for _, n := range content {
					held[target][n] = max(0, held[target][n]-1)
				}
			} else {
				x.Store(&Stored{Target: target, Root: 1, Names: names, Blocks: chain})
				all := len(content) > 1
				for _, n := range content {
					all = all && held[target][n] > 0
				}
				for _, n := range content {
					if !all {
						held[target][n]++
					}
				}
			}
			blocks += len(chain)
			if x.Bytes() > bound {
				t.Fatalf("long %d: %d bytes", c.long, x.Bytes())
			}
			x.Match(1, &m, chain)
			for target, got := range m.Depth[Device] {
				want := int32(0)
				for int(want) < len(content) && held[target][content[want]] > 0 {
					want++
				}
				if got > want || got < want && !x.Incomplete(target) {
					t.Fatalf("long %d, target %d: depth %d, want %d", c.long, target, got, want)
				}
			}
			if i%3000 == 0 {
				x.check(t)
			}
		}
		held = [targets]map[uint64]int{}
		near := func(what string, least int64) {
			t.Helper()
			x.check(t)
			real := heap() - before
			t.Logf("long %d, %s: %d bytes, really %d, %d blocks", c.long, what, x.Bytes(), real, x.distinct())
			if real > x.Bytes()*5/4+300_000 || x.Bytes() > real*5/4+300_000 {
				t.Errorf("long %d, %s: %d bytes, really %d", c.long, what, x.Bytes(), real)
			}
			if x.Bytes() < least {
				t.Errorf("long %d, %s: only %d bytes are used", c.long, what, x.Bytes())
			}
		}
		near("full", bound*8/10)
		x.SetMemory(bound / 2)
		for most := x.Bytes(); x.Step(200); most = x.Bytes() {
			if x.Bytes() > most {
				t.Fatal("grows while its bound is lowered")
			}
		}
		if x.Bytes() > bound/2 {
			t.Errorf("long %d: %d bytes of %d", c.long, x.Bytes(), bound/2)
		}
		near("halved", bound*3/10)
		for i := range targets {
			x.Clear(i)
		}
		for x.Step(1000) {
		}
		near("cleared", 0)
		if x.Bytes() > New(0).Bytes()+10_000 || x.distinct() != 0 {
			t.Errorf("long %d: %d bytes and %d blocks are left", c.long, x.Bytes(), x.distinct())
		}
	}
}

// TestFullIndexKeepsItsSize stores new chains in a full index: it evicts about as many blocks.
func TestFullIndexKeepsItsSize(t *testing.T) {
	const bound = 2_500_000
	x := New(bound)
	least, most := int64(bound), int64(0)
	for i := range uint64(600) {
		c := chainOf(i, 512)
		feed(x, 0, c, namesOf(1, c), 512)
		if n := x.Blocks(0, Device); x.Incomplete(0) {
			least, most = min(least, n), max(most, n)
		}
	}
	if least < bound/75 || most*4 > least*5 {
		t.Errorf("%d to %d blocks", least, most)
	}
}

// TestRefusals has what cannot be recorded.
func TestRefusals(t *testing.T) {
	x := New(1 << 20)
	for _, c := range []struct {
		s    Stored
		want Outcome
	}{
		{Stored{}, OK},
		{Stored{HasParent: true, Names: []uint64{1}, Blocks: []uint64{1}}, UnknownParent},
		{Stored{Names: []uint64{1}}, UnknownName},
		{Stored{Names: make([]uint64, 1<<20), Blocks: make([]uint64, 1<<20)}, NoRoom},
		{Stored{Names: []uint64{1, 1}, Blocks: []uint64{1, 2}}, Contradiction},
	} {
		if _, got := x.Store(&c.s); got != c.want {
			t.Errorf("target %d, tier %d: outcome %d, want %d", c.s.Target, c.s.Tier, got, c.want)
		}
	}
	if n := x.Remove(7, Device, []uint64{1, 2}); n != 2 {
		t.Errorf("%d unknown", n)
	}
	x.check(t)
}

// TestManyTargetsCount has more targets than one word has columns.
func TestManyTargetsCount(t *testing.T) {
	x := New(64 << 20)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for target := range 1024 {
		for i := range 32 {
			block := uint64(target*32+i+1) * 0x9e3779b97f4a7c15
			x.Store(&Stored{Target: target, Root: 1, Names: []uint64{block}, Blocks: []uint64{block}})
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if heap, counted := int64(after.HeapAlloc-before.HeapAlloc), x.Bytes(); counted < heap*9/10 {
		t.Errorf("%d KiB are counted of %d KiB", counted>>10, heap>>10)
	}
	runtime.KeepAlive(x)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
