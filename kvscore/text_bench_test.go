package kvscore

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// BenchmarkTextChoice chooses a target for a prompt of 8,192 blocks of text, which all targets hold, with its
// booking and end. With events, the router has learned its token blocks.
func BenchmarkTextChoice(b *testing.B) {
	for _, fed := range []bool{false, true} {
		b.Run(fmt.Sprintf("events=%v", fed), func(b *testing.B) { chooseText(b, 8192, 64, fed) })
	}
}

func chooseText(b *testing.B, blocks, n int, fed bool) {
	s := NewScheduler(Settings{})
	ratios := new(Ratios)
	r := &Request{Prompt: cache.Prompt{Root: 1, BlockTokens: 16, Tokens: int64(16 * blocks), Weights: ratios.Weights("m", 64)}, Streamed: true}
	for i := range blocks {
		r.Blocks = append(r.Blocks, TextBlock(cache.Mix(uint64(i)), uint8(i%8)))
	}
	ts := targets(n)
	var feeds []*cache.Feed
	for _, t := range ts {
		s.Declare(t, 1<<30)
		if fed {
			f := s.Caches().Feed(t)
			f.Describe(exactInfo)
			feeds = append(feeds, f)
		}
	}
	root := cache.IdentityRoot(testSeed, 16, "", "")
	if fed {
		r.Identities = []cache.Identity{{BlockTokens: 16, Root: root}}
	}
	now := epoch
	counts := Counts{Prompt: int64(16*blocks) + 1, CachedReported: true}
	for i := range 2 * n {
		var sel Selection
		_, l := s.Select(now, r, ts[i%n:i%n+1], 0, new(LeastLoad), &sel)
		if fed && i < n {
			feeds[i].Stored(&cache.Stored{Root: root, Names: r.Blocks, Blocks: r.Blocks})
		}
		l.FirstToken(now)
		now = now.Add(time.Second)
		l.Counted(counts)
		l.End(true, nil)
		counts.Cached = int64(16 * blocks)
	}
	refs, p, sel := s.Refs(ts), NewPredictedLatency(), &Selection{Rand: seeded(1)}
	b.ReportAllocs()
	least := time.Duration(math.MaxInt64) // on shared machines most are disturbed
	for b.Loop() {
		begin := time.Now()
		i, l := s.SelectAmong(now, r, refs, -1, p, sel)
		if c := &sel.Candidates[i]; c.OverlapTokens < int64(16*blocks)-32 || fed != (c.Knowledge == cache.Learned) {
			b.Fatalf("overlap %d, %s", c.OverlapTokens, c.Knowledge)
		}
		l.FirstToken(now)
		l.End(false, nil)
		least = min(least, time.Since(begin))
		now = now.Add(time.Millisecond)
	}
	b.ReportMetric(float64(least.Nanoseconds()), "least-ns")
}
