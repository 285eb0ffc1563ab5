package approx

import (
	"fmt"
	"testing"
	"time"
)

func seq(from, n uint64) []uint64 {
	b := make([]uint64, n)
	for i := range b {
		b[i] = from + uint64(i)
	}
	return b
}

func declared(slots int) *Index {
	x := New(64 << 20)
	for i := range slots {
		x.SetCapacity(i, 0)
	}
	return x
}

func TestEmptyChains(t *testing.T) {
	x := declared(2)
	ref, n := x.acquireAll(0, &Chain{Root: 1, Blocks: nil, Weights: Same(1000)})
	x.Release(ref, true)
	if n != 0 || x.Blocks() != 0 {
		t.Errorf("acquired %d blocks of an empty chain, %d known", n, x.Blocks())
	}
	m := Match{Held: make([]int32, 9), InUse: []int32{7}, Blocks: 3, Arrivals: 3}
	x.Match(&Chain{Root: 1, Blocks: nil}, &m)
	if len(m.Held) != 2 || len(m.InUse) != 2 || m.InUse[0] != 0 || m.Blocks+m.Arrivals != 0 {
		t.Errorf("match of an empty chain: %+v", m)
	}
}

func TestVeryLongChain(t *testing.T) {
	x := declared(2)
	long := seq(1, 100_000)
	x.Touch(0, &Chain{Root: 1, Blocks: long, Weights: Same(16_000)}, 0, -1)
	ref, n := x.acquireAll(1, &Chain{Root: 1, Blocks: long[:70_000], Weights: Same(16_000)})
	var m Match
	x.Match(&Chain{Root: 1, Blocks: long}, &m)
	if n != 70_000 || m.Held[0] != 100_000 || m.Held[1] != 70_000 || m.InUse[1] != 70_000 {
		t.Errorf("%d acquired, %+v", n, m)
	}
	x.SetCapacity(0, 16*50_000)
	x.Release(ref, true)
	x.check(t)
	x.Match(&Chain{Root: 1, Blocks: long}, &m)
	if m.Held[0] != 50_000 || m.Held[1] != 70_000 || x.Blocks() != 70_000 {
		t.Errorf("%+v, %d blocks", m, x.Blocks())
	}
	same := make([]uint64, 5000) // one content hash throughout
	x.Touch(0, &Chain{Root: 2, Blocks: same, Weights: Same(16_000)}, 0, -1)
	if x.Match(&Chain{Root: 2, Blocks: same[:4000]}, &m); m.Held[0] != 4000 {
		t.Errorf("held %d of equal blocks", m.Held[0])
	}
	x.check(t)
}

func TestNoAllocationPerBlock(t *testing.T) {
	x := declared(8)
	chain := seq(1, 2000)
	for i := range 8 {
		x.Touch(i, &Chain{Root: 1, Blocks: chain[:200*(i+1)], Weights: Same(16_000)}, 0, -1)
	}
	var m Match
	x.Match(&Chain{Root: 1, Blocks: chain}, &m)
	if n := testing.AllocsPerRun(100, func() { x.Match(&Chain{Root: 1, Blocks: chain}, &m) }); n != 0 {
		t.Errorf("Match allocates %v times", n)
	}
	if n := testing.AllocsPerRun(100, func() {
		ref, _ := x.Acquire(3, &Chain{Root: 1, Blocks: chain[:800], Weights: Same(16_000)}, -1)
		x.Release(ref, true)
	}); n != 0 {
		t.Errorf("Acquire and Release of what is held allocate %v times", n)
	}
	if n := testing.AllocsPerRun(100, func() {
		ref, _ := x.Acquire(3, &Chain{Root: 2, Blocks: chain, Weights: Same(16_000)}, -1)
		x.Release(ref, false)
	}); n > 6 {
		t.Errorf("Acquire of a new chain allocates %v times", n)
	}
}

func TestVeryDeepChain(t *testing.T) {
	x := declared(1)
	const long = maxRuns + 500
	chain := seq(1, long)
	for i := 1; i < long; i++ { // each is a run longer than the one before
		x.Touch(0, &Chain{Root: 1, Blocks: chain[:i], Weights: Same(16_000)}, 0, -1)
	}
	ref, n := x.acquireAll(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
	if n != maxRuns {
		t.Errorf("%d blocks are tracked, want %d", n, maxRuns)
	}
	x.Release(ref, true)
	x.check(t)
}

// leastOf reports the least time of short rounds.
func leastOf(b *testing.B, f func()) {
	b.ReportAllocs()
	const round = 16
	best := time.Duration(1 << 62)
	for i := 0; b.Loop(); i += round {
		start := time.Now()
		for range round {
			f()
		}
		best = min(best, time.Since(start))
	}
	b.ReportMetric(float64(best.Nanoseconds())/round, "least-ns")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/round, "mean-ns")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkMatch has 64 slots that hold a prompt of 8,192 blocks, from which others branch off.
func BenchmarkMatch(b *testing.B) {
	for _, slots := range []int{8, 64, 512} {
		for _, every := range []int{8192, 64, 16} {
			x := declared(slots)
			long := seq(1, 8192)
			for i := range slots {
				x.Touch(i, &Chain{Root: 1, Blocks: long, Weights: Same(16_000)}, 0, -1)
			}
			for at := every; at < len(long); at += every {
				x.Touch(at/every%slots, &Chain{Root: 1, Blocks: append(long[:at:at], uint64(1_000_000+at)), Weights: Same(16_000)}, 0, -1)
			}
			var m Match
			b.Run(fmt.Sprintf("match/every%d/%d", every, slots), func(b *testing.B) {
				leastOf(b, func() { x.Match(&Chain{Root: 1, Blocks: long}, &m) })
			})
			b.Run(fmt.Sprintf("book/every%d/%d", every, slots), func(b *testing.B) {
				leastOf(b, func() {
					ref, _ := x.Acquire(3, &Chain{Root: 1, Blocks: long, Weights: Same(16_000)}, m.Blocks)
					x.Release(ref, true)
				})
			})
		}
	}
}
