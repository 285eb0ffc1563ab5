package approx

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// fill fills an index with chains of a length, round the slots.
func fill(x *Index, rnd *rand.Rand, slots, long int) {
	b := make([]uint64, long)
	for n := 0; x.Bytes() < x.memory-x.memory/32; n++ {
		for i := range b {
			b[i] = rnd.Uint64()
		}
		x.Touch(n%slots, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)}, 0)
	}
}

// mixture runs operations of all kinds on a full index, lets what is given
// look at each, and changes the settings as a reload does. The last slot is
// only cleared.
func mixture(x *Index, rnd *rand.Rand, slots, steps int, timed func(what string, op func())) {
	long := make([]uint64, 8000)
	var refs []Ref
	for i := range steps {
		b := long[:1]
		if rnd.IntN(8) == 0 {
			b = long[:1+rnd.IntN(len(long))]
		}
		for i := range b {
			b[i] = rnd.Uint64()
		}
		slot := rnd.IntN(slots - 1)
		timed("acquire", func() {
			ref, _ := x.Acquire(slot, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)})
			refs = append(refs, ref)
		})
		if len(refs) > 50 {
			k := rnd.IntN(len(refs))
			timed("release", func() { x.Release(refs[k], rnd.IntN(9) > 0) })
			refs[k] = refs[len(refs)-1]
			refs = refs[:len(refs)-1]
		}
		timed("touch", func() { x.Touch(slot, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)}, 0) })
		timed("step", func() { x.Step(settleWork) })
		switch i {
		case steps * 1 / 6:
			huge := make([]uint64, 200_000)
			for i := range huge {
				huge[i] = rnd.Uint64()
			}
			timed("a huge prompt", func() { x.Touch(slot, &Chain{Root: 1, Blocks: huge, Weights: Same(16_000)}, 0) })
		case steps * 2 / 6:
			timed("lower a capacity", func() { x.SetCapacity(0, 16) })
		case steps * 3 / 6:
			timed("clear", func() { x.Clear(slots - 1) })
		case steps * 4 / 6:
			timed("lower the memory", func() { x.SetMemory(x.memory / 8) })
		}
	}
	for _, ref := range refs {
		x.Release(ref, true)
	}
}

// However large the index, and whatever must be forgotten, moved or grown for
// it, no call does more than a bounded amount of work.
func TestEveryCallIsBounded(t *testing.T) {
	const bound = roomWork + settleWork + 2*page + 4096
	for _, long := range []int{1, 8} {
		rnd := rand.New(rand.NewPCG(6, uint64(long)))
		x := New(48 << 20)
		for i := range 4 {
			x.SetCapacity(i, 0)
		}
		worst := map[string]uint64{}
		timed := func(what string, op func()) {
			before := x.worked
			op()
			worst[what] = max(worst[what], x.worked-before)
		}
		timed("fill", func() {})
		b := make([]uint64, long)
		for n := 0; x.Bytes() < x.memory-x.memory/32; n++ {
			for i := range b {
				b[i] = rnd.Uint64()
			}
			timed("fill", func() { x.Touch(n%4, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)}, 0) })
		}
		mixture(x, rnd, 4, 3000, timed)
		t.Logf("chains of %d: %v", long, worst)
		for what, work := range worst {
			if work > bound {
				t.Errorf("chains of %d: %s visits %d records, want at most %d", long, what, work, bound)
			}
		}
		x.check(t)
		catchUp(t, x)
		x.check(t)
		if x.Bytes() > 6<<20 || x.Used(0) > 16 || !x.Idle(3) {
			t.Errorf("chains of %d: %d bytes, %d tokens on slot 0, slot 3 idle %v", long, x.Bytes(), x.Used(0), x.Idle(3))
		}
	}
}

// Work that was put off must leave everything in order at any moment.
func TestOrderWhileBehind(t *testing.T) {
	for seed := range uint64(8) {
		rnd := rand.New(rand.NewPCG(7, seed))
		x := New(2 << 20)
		slots := 5
		for i := range slots {
			x.SetCapacity(i, int64(rnd.IntN(3))*200_000)
		}
		var refs []Ref
		for i := range 3000 {
			b := conversation(rnd, 4, 2000, 1+int(seed)*20)
			slot := rnd.IntN(slots)
			switch op := rnd.IntN(100); {
			case op < 40:
				ref, _ := x.Acquire(slot, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)})
				refs = append(refs, ref)
			case op < 75 && len(refs) > 0:
				k := rnd.IntN(len(refs))
				x.Release(refs[k], rnd.IntN(3) > 0)
				refs[k] = refs[len(refs)-1]
				refs = refs[:len(refs)-1]
			case op < 92:
				x.Touch(slot, &Chain{Root: 1, Blocks: b, Weights: Same(16_000)}, 0)
			case op < 94:
				x.SetCapacity(slot, int64(rnd.IntN(100_000)))
			case op < 95:
				x.SetMemory(int64(64<<10 + rnd.IntN(2<<20)))
			case op < 96:
				x.Clear(slot)
			default:
				x.Step(rnd.IntN(400))
			}
			if i%32 == 0 {
				x.check(t)
			}
		}
		for _, ref := range refs {
			x.Release(ref, rnd.IntN(2) == 0)
		}
		catchUp(t, x)
		x.check(t)
		if x.Bytes() > x.memory {
			t.Errorf("%d bytes of %d", x.Bytes(), x.memory)
		}
	}
}

// The places of parked holds can be far from the end of the order: then they
// become recent instead, and heads stay behind tails.
func TestManyParked(t *testing.T) {
	x := declared(1)
	stem := seq(1, 3000)
	for i := 3000; i > 0; i-- { // a run for each block
		x.Touch(0, &Chain{Root: 1, Blocks: append(stem[:i:i], uint64(i)<<32), Weights: Same(1000)}, 0)
	}
	var refs []Ref
	for i := range 2000 {
		ref, _ := x.Acquire(0, &Chain{Root: 1, Blocks: stem[:i+1], Weights: Same(1000)})
		refs = append(refs, ref)
	}
	x.SetCapacity(0, 3000)
	catchUp(t, x) // parks all
	refreshed := x.clock
	for n, ref := range refs {
		before := x.worked
		x.Release(ref, false)
		// each run with its holds and its place in the order
		if work := x.worked - before; work > uint64(5*(n+1)+maxWalk+settleWork+2*page) {
			t.Fatalf("the release of %d runs visits %d records", n+1, work)
		}
	}
	if x.clock == refreshed {
		t.Error("all places were near: nothing is tested")
	}
	x.check(t)
}

// A chain cut in very many runs is tracked as far as one call may walk.
func TestVeryDeepChain(t *testing.T) {
	x := declared(1)
	const long = maxRuns + 500
	chain := seq(1, long)
	for i := 1; i < long; i++ { // each is a run longer than the one before
		x.Touch(0, &Chain{Root: 1, Blocks: chain[:i], Weights: Same(16_000)}, 0)
	}
	ref, n := x.Acquire(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
	if n != maxRuns {
		t.Errorf("%d blocks are tracked, want %d", n, maxRuns)
	}
	x.Release(ref, true)
	x.check(t)
}

// What a cleared slot had goes before what any other slot has.
func TestClearedSlotMakesRoomFirst(t *testing.T) {
	x := New(4 << 20)
	x.SetCapacity(0, 0)
	x.SetCapacity(1, 0)
	rnd := rand.New(rand.NewPCG(10, 10))
	for i := range uint64(1000) {
		x.Touch(0, &Chain{Root: 1, Blocks: seq(i<<32, 2), Weights: Same(16_000)}, 0)
	}
	for x.Bytes() < x.memory*9/10 {
		x.Touch(1, &Chain{Root: 1, Blocks: []uint64{rnd.Uint64()}, Weights: Same(16_000)}, 0)
	}
	x.Clear(1)
	for x.Used(1) > 0 {
		x.Touch(0, &Chain{Root: 2, Blocks: []uint64{rnd.Uint64(), rnd.Uint64(), rnd.Uint64(), rnd.Uint64()}, Weights: Same(16_000)}, 0)
	}
	x.check(t)
	var m Match
	for i := range uint64(1000) {
		if x.Match(&Chain{Root: 1, Blocks: seq(i<<32, 2)}, &m); m.Blocks != 2 {
			t.Fatalf("chain %d has %d blocks", i, m.Blocks)
		}
	}
}

// A run whose first blocks many others begin with is not moved, and all else
// finds room around it.
func TestDrainLeavesWhatCannotMove(t *testing.T) {
	x := New(4 << 20)
	x.SetCapacity(0, 0)
	rnd := rand.New(rand.NewPCG(8, 8))
	var refs []Ref
	for range 2 * page { // the stem shall not be on the first page, which stays
		x.Touch(0, &Chain{Root: 1, Blocks: []uint64{rnd.Uint64()}, Weights: Same(16_000)}, 0)
	}
	for range 20 { // pinned, on many pages
		ref, _ := x.Acquire(0, &Chain{Root: 1, Blocks: []uint64{rnd.Uint64(), rnd.Uint64()}, Weights: Same(16_000)})
		refs = append(refs, ref)
		for range 1000 {
			x.Touch(0, &Chain{Root: 1, Blocks: []uint64{7, rnd.Uint64()}, Weights: Same(16_000)}, 0)
		}
	}
	x.SetMemory(3 << 19)
	catchUp(t, x)
	x.check(t)
	var m Match
	if x.Match(&Chain{Root: 1, Blocks: []uint64{7}}, &m); m.Blocks != 1 || x.Bytes() > 3<<19 {
		t.Errorf("the stem has %d blocks, %d bytes in all", m.Blocks, x.Bytes())
	}
	x.SetMemory(256 << 10)
	catchUp(t, x)
	x.check(t)
	if x.InUse(0) != 40*16 || x.Bytes() > 1<<20 {
		t.Errorf("%d tokens in use, %d bytes", x.InUse(0), x.Bytes())
	}
	for _, ref := range refs {
		x.Release(ref, true)
	}
	catchUp(t, x)
	if x.check(t); x.Bytes() > 256<<10 {
		t.Errorf("%d bytes after the release", x.Bytes())
	}
	x.SetMemory(0)
	catchUp(t, x)
	if x.check(t); x.Bytes() > 8<<10 {
		t.Errorf("%d bytes are kept although none may be", x.Bytes())
	}
	if _, n := x.Acquire(0, &Chain{Root: 1, Blocks: seq(1, 9), Weights: Same(16_000)}); n != 0 {
		t.Errorf("%d blocks are taken without memory", n)
	}
	x.SetMemory(1 << 20)
	if _, n := x.Acquire(0, &Chain{Root: 1, Blocks: seq(1, 9), Weights: Same(16_000)}); n != 9 {
		t.Errorf("%d blocks of 9 are taken after that", n)
	}
}

// BenchmarkPause shows the longest call on a full index of 512 MiB, in which
// tiny prompts meet long ones and the settings change. Another program on the
// machine, or the collector, may be in it.
func BenchmarkPause(b *testing.B) {
	for b.Loop() {
		rnd := rand.New(rand.NewPCG(9, 9))
		x := New(512 << 20)
		for i := range 4 {
			x.SetCapacity(i, 0)
		}
		fill(x, rnd, 4, 1)
		worst, all := map[string]time.Duration{}, []time.Duration{}
		mixture(x, rnd, 4, 60_000, func(what string, op func()) {
			start := time.Now()
			op()
			d := time.Since(start)
			worst[what] = max(worst[what], d)
			all = append(all, d)
		})
		b.Logf("longest: %v", worst)
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)-1].Microseconds()), "longest-µs")
		b.ReportMetric(float64(all[len(all)-len(all)/10_000].Microseconds()), "p99.99-µs")
	}
}
