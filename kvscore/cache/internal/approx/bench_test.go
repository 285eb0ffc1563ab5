package approx

import (
	"fmt"
	"runtime"
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
