package approx

import (
	"fmt"
	"testing"
)

// path returns an index where 8 slots hold a 512-block chain cut in 10 runs.
func path() (*Index, []uint64) {
	x := declared(8)
	chain := seq(1, 512)
	for i := 1; i < 10; i++ {
		x.Touch(0, &Chain{Root: 1, Blocks: append(chain[:i*51:i*51], 1_000_000), Weights: Same(16_000)}, 0)
	}
	for i := range 8 {
		x.Touch(i, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)}, 0)
	}
	return x, chain
}

func BenchmarkMatch(b *testing.B) {
	bench := func(name string, x *Index, chain []uint64) {
		b.Run(name, func(b *testing.B) {
			var m Match
			b.ReportAllocs()
			for b.Loop() {
				x.Match(&Chain{Root: 1, Blocks: chain}, &m)
			}
		})
	}
	x, chain := path()
	bench("512x8-10runs", x, chain)
	bench("miss", x, seq(9_000_000, 512))

	full := declared(64)
	long := seq(1, 8192)
	for i := range 64 {
		full.Touch(i, &Chain{Root: 1, Blocks: long, Weights: Same(16_000)}, 0)
	}
	bench("full-8192x64", full, long)

	middle := declared(64)
	for i := range 64 { // a run for each holder
		middle.Touch(i, &Chain{Root: 1, Blocks: long[:32*(i+1)], Weights: Same(16_000)}, 0)
	}
	bench("skewed-2048x64", middle, long[:2048])

	skewed := declared(64)
	for i := range 64 {
		skewed.Touch(i, &Chain{Root: 1, Blocks: long[:128*(i+1)], Weights: Same(16_000)}, 0)
	}
	bench("skewed-8192x64", skewed, long)

	branchy := declared(8)
	for i := 1; i < 64; i++ { // a branch every 16 blocks
		branchy.Touch(i%8, &Chain{Root: 1, Blocks: append(long[:i*16:i*16], 1_000_000), Weights: Same(16_000)}, 0)
	}
	for i := range 8 {
		branchy.Touch(i, &Chain{Root: 1, Blocks: long[:1024], Weights: Same(16_000)}, 0)
	}
	bench("branchy-1024x8", branchy, long[:1024])
}

func BenchmarkAcquireRelease(b *testing.B) {
	b.Run("known-512x8-10runs", func(b *testing.B) {
		x, chain := path()
		b.ReportAllocs()
		for b.Loop() {
			ref, _ := x.Acquire(3, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
			x.Release(ref, true)
		}
	})
	b.Run("new-512-evicting", func(b *testing.B) {
		x := New(8 << 20) // about 2000 chains
		x.SetCapacity(0, 0)
		chain := seq(1, 512)
		b.ReportAllocs()
		for i := uint64(0); b.Loop(); i++ {
			chain[32] = 1<<40 + i // below a stem of 32
			ref, _ := x.Acquire(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
			x.Release(ref, true)
		}
	})
	b.Run("failed-512", func(b *testing.B) {
		x := declared(1)
		chain := seq(1, 512)
		b.ReportAllocs()
		for b.Loop() {
			ref, _ := x.Acquire(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
			x.Release(ref, false)
		}
	})
}

func BenchmarkTouch(b *testing.B) {
	for _, runs := range []int{1, 10} {
		b.Run(fmt.Sprintf("known-512-%druns", runs), func(b *testing.B) {
			x, chain := path()
			root := uint64(1)
			if runs == 1 {
				root = 2
			}
			b.ReportAllocs()
			for b.Loop() {
				x.Touch(3, &Chain{Root: root, Blocks: chain, Weights: Same(16_000)}, 0)
			}
		})
	}
	b.Run("new-512-small-capacity", func(b *testing.B) {
		x := declared(8)
		x.SetCapacity(0, 16*50_000)
		chain := seq(1, 512)
		b.ReportAllocs()
		for i := uint64(0); b.Loop(); i++ {
			chain[32] = 1<<40 + i
			x.Touch(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)}, 0)
		}
	})
}
