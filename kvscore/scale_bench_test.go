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

// BenchmarkChoose is the policy's part of a choice.
func BenchmarkChoose(b *testing.B) {
	for _, policy := range costly {
		for _, n := range []int{8, 64, 512} {
			b.Run(fmt.Sprintf("%s/%dtargets", policy.name, n), func(b *testing.B) {
				s := &Selection{
					Tokens: 4000, BlockSize: 16, Rand: seeded(1), Home: n / 2, Awaiting: n,
					ExpectedAnswer: 200, ExpectedTurns: 3, TurnTime: 100, Latency: fastEngine.Latency,
				}
				for i := range n {
					s.Candidates = append(s.Candidates, Candidate{
						Target: Target{Worker: uint64(i)}, OverlapBlocks: float64(100 + i%7), OverlapTokens: int64(1600 + 16*(i%7)),
						PrefillTokens: int64(i * 37 % 900), PromptBlocks: float64(i * 13 % 500), RequestBlocks: 250, Requests: i % 9,
						Awaiting: i % 3, Slowness: 1, WaitTime: float64(i * 37 % 900), PrefillTime: 60 - float64(i%7), RecentWork: float64(i % 11),
					})
				}
				p := policy.new()
				b.ReportAllocs()
				for b.Loop() {
					p.Choose(s)
				}
			})
		}
	}
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
