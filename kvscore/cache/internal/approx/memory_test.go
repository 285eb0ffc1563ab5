package approx

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

// conversation returns a chain that shares a stem with others of its kind and
// is otherwise its own.
func conversation(rnd *rand.Rand, stems, ids, long int) []uint64 {
	stem := rand.New(rand.NewPCG(1, rnd.Uint64N(uint64(stems))))
	own := rand.New(rand.NewPCG(2, rnd.Uint64N(uint64(ids))))
	b := make([]uint64, 0, 40+long)
	for range 40 {
		b = append(b, stem.Uint64())
	}
	for range 1 + rnd.IntN(long) {
		b = append(b, own.Uint64())
	}
	return b
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// catchUp does all work that is left.
func catchUp(t testing.TB, x *Index) {
	t.Helper()
	for n := 0; x.Step(5000); n++ {
		if n > 100_000 {
			t.Fatal("the work does not end")
		}
	}
}

func TestMemoryStaysWithinBound(t *testing.T) {
	for _, long := range []int{3, 60, 3000} { // mostly records; mixed; mostly hashes
		const bound = 8 << 20
		before := heap()
		x := New(bound)
		for i := range 8 {
			x.SetCapacity(i, 0)
		}
		rnd := rand.New(rand.NewPCG(3, uint64(long)))
		var refs []Ref
		for i, blocks := 0, 0; blocks < 4_000_000 && i < 100_000; i++ {
			b := conversation(rnd, 50, 1_000_000, long)
			blocks += len(b)
			ref, n := x.acquireAll(rnd.IntN(8), &Chain{Root: 1, Blocks: b, Weights: Same(16_000)})
			if n < len(b) {
				t.Fatalf("long %d: %d of %d blocks although little is in use", long, n, len(b))
			}
			refs = append(refs, ref)
			if len(refs) > 100 {
				k := rnd.IntN(len(refs))
				x.Release(refs[k], rnd.IntN(9) > 0)
				refs[k] = refs[len(refs)-1]
				refs = refs[:len(refs)-1]
			}
			if x.Bytes() > bound {
				t.Fatalf("long %d: %d bytes", long, x.Bytes())
			}
		}
		x.check(t)
		near := func(what string, low int64) {
			t.Helper()
			real := heap() - before
			t.Logf("long %d, %s: %d bytes, really %d, %d blocks", long, what, x.Bytes(), real, x.Blocks())
			if real > x.Bytes()*6/5+200_000 || x.Bytes() > real*6/5+200_000 {
				t.Errorf("long %d, %s: %d bytes, really %d", long, what, x.Bytes(), real)
			}
			if x.Bytes() < low {
				t.Errorf("long %d, %s: only %d bytes are used", long, what, x.Bytes())
			}
		}
		near("full", bound*3/4)
		x.SetMemory(bound / 4)
		catchUp(t, x)
		x.check(t)
		if x.Bytes() > bound/4 {
			t.Errorf("long %d: %d bytes after the bound was lowered", long, x.Bytes())
		}
		near("lowered", bound/6)
		for _, ref := range refs {
			x.Release(ref, true)
		}
		for i := range 8 {
			x.Clear(i)
		}
		catchUp(t, x)
		x.check(t)
		if x.Bytes() > 40<<10 || x.Blocks() != 0 {
			t.Errorf("long %d: %d bytes, %d blocks left", long, x.Bytes(), x.Blocks())
		}
		near("cleared", 0)
		runtime.KeepAlive(x)
	}
}

// When memory is full, what was used longest ago goes first, whichever slot
// has it.
func TestMemoryForgetsOldestOfAllSlots(t *testing.T) {
	x := New(512 << 10)
	for i := range 4 {
		x.SetCapacity(i, 0)
	}
	const chains = 3000
	for i := range uint64(chains) {
		x.Touch(int(i*i%7%4), &Chain{Root: i, Blocks: seq(1, 20), Weights: Same(16_000)}, 0, -1)
	}
	var m Match
	kept := 0
	for i := range uint64(chains) {
		x.Match(&Chain{Root: i, Blocks: seq(1, 20)}, &m)
		if m.Blocks < 20 && kept > 1 { // the oldest may be cut
			t.Fatalf("chain %d has %d blocks, although an older is there", i, m.Blocks)
		}
		if m.Blocks > 0 {
			kept++
		}
	}
	if kept < 1000 || kept == chains {
		t.Errorf("%d of %d chains are there", kept, chains)
	}
}
