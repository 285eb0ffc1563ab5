package approx

import (
	"fmt"
	"runtime"
	"testing"
	"time"
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
				x.Touch(i, &Chain{Root: 1, Blocks: long, Weights: Same(16_000)}, 0)
			}
			for at := every; at < len(long); at += every {
				x.Touch(at/every%slots, &Chain{Root: 1, Blocks: append(long[:at:at], uint64(1_000_000+at)), Weights: Same(16_000)}, 0)
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

func BenchmarkMemory(b *testing.B) {
	for _, c := range []struct{ long, holders int }{{16, 1}, {64, 1}, {512, 1}, {16, 8}, {64, 8}, {512, 8}} {
		b.Run(fmt.Sprintf("%dx%d", c.long, c.holders), func(b *testing.B) {
			for b.Loop() {
				before := heap()
				x := declared(8)
				n := 0
				for i := 0; n < 500_000; i++ {
					chain := seq(uint64(i)*1000, uint64(c.long))
					for h := range c.holders {
						x.Touch((i+h)%8, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)}, 0)
						n += c.long
					}
				}
				b.ReportMetric(float64(heap()-before)/float64(n), "heap-B/entry")
				b.ReportMetric(float64(x.Bytes())/float64(n), "counted-B/entry")
				runtime.KeepAlive(x)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	b.Run("known-512x8-10runs", func(b *testing.B) {
		x, chain := path()
		b.ReportAllocs()
		for b.Loop() {
			ref, _ := x.acquireAll(3, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
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
			ref, _ := x.acquireAll(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
			x.Release(ref, true)
		}
	})
	b.Run("failed-512", func(b *testing.B) {
		x := declared(1)
		chain := seq(1, 512)
		b.ReportAllocs()
		for b.Loop() {
			ref, _ := x.acquireAll(0, &Chain{Root: 1, Blocks: chain, Weights: Same(16_000)})
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
