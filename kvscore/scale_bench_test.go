package kvscore

import (
	"fmt"
	"testing"
	"time"
)

// costly are the policies that compare costs.
var costly = []struct {
	name string
	new  func() Policy
}{
	{"predicted_latency", func() Policy { return NewPredictedLatency() }},
	{"dynamo", func() Policy { return NewDynamo() }},
}

// BenchmarkSelectAmong chooses among many idle and busy targets, sees the first
// token, and ends that. A fourth of the targets hold a part of the prompt.
func BenchmarkSelectAmong(b *testing.B) {
	for _, policy := range costly {
		for _, n := range []int{8, 64, 512} {
			for _, requests := range []int{0, 4} {
				b.Run(fmt.Sprintf("%s/%dtargets/%drequests", policy.name, n, requests), func(b *testing.B) {
					s, ts := declared(n)
					p, sel := policy.new(), &Selection{Rand: seeded(1)}
					for i := range ts {
						if i%4 == 0 {
							_, l := s.Select(epoch, prompt(upTo(uint64(16+i%7))...), ts, i, nil, sel)
							l.FirstToken(epoch.Add(100 * time.Millisecond))
							l.End(true, nil)
						}
						for k := range requests * (i % 3) {
							s.Select(epoch, prompt(distinct(uint64(i<<8+k), 40)...), ts, i, nil, sel)
						}
					}
					r, refs, at := prompt(upTo(256)...), s.Refs(ts), epoch
					b.ReportAllocs()
					for b.Loop() {
						_, l := s.SelectAmong(at, r, refs, -1, p, sel)
						at = at.Add(200 * time.Millisecond)
						l.FirstToken(at)
						l.End(false, nil)
					}
				})
			}
		}
	}
}
