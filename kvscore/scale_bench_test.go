package kvscore

import (
	"fmt"
	"testing"
)

// BenchmarkSelectAmong chooses among many targets, a fourth of which hold a part
// of the prompt, and ends that: idle ones and busy ones.
func BenchmarkSelectAmong(b *testing.B) {
	for _, n := range []int{8, 64, 512} {
		for _, requests := range []int{0, 4} {
			b.Run(fmt.Sprintf("%dtargets/%drequests", n, requests), func(b *testing.B) {
				s, ts := NewScheduler(Settings{}), targets(n)
				p, sel := NewDynamo(), &Selection{Rand: seeded(1)}
				for i, t := range ts {
					s.Declare(t, 0)
					if i%4 == 0 {
						_, l := s.Select(epoch, prompt(upTo(uint64(16+i%7))...), ts, i, nil, sel)
						l.End(true, nil)
					}
					for k := range requests * (i % 3) {
						s.Select(epoch, prompt(distinct(uint64(i<<8+k), 40)...), ts, i, nil, sel)
					}
				}
				r, refs := prompt(upTo(256)...), s.Refs(ts)
				b.ReportAllocs()
				for b.Loop() {
					_, l := s.SelectAmong(epoch, r, refs, -1, p, sel)
					l.End(false, nil)
				}
			})
		}
	}
}

// BenchmarkSelectParallel has all processors choose at once.
func BenchmarkSelectParallel(b *testing.B) {
	s, ts := NewScheduler(Settings{}), targets(64)
	for _, t := range ts {
		s.Declare(t, 0)
	}
	refs, p, r := s.Refs(ts), NewDynamo(), prompt(upTo(64)...)
	b.RunParallel(func(pb *testing.PB) {
		sel := &Selection{Rand: seeded(1)}
		for pb.Next() {
			_, l := s.SelectAmong(epoch, r, refs, -1, p, sel)
			l.End(false, nil)
		}
	})
}
