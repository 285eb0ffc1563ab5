package approx

import (
	"fmt"
	"testing"
	"time"
)

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
