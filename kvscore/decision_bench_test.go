package kvscore

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// BenchmarkDecision is a whole decision from token ids. It has the hashes of the blocks, the
// look-up in the index of KV events, the choice, the booking and its end. Dynamo takes 104 us for
// 8,192 blocks and 64 targets, with chain hashes and without booking.
func BenchmarkDecision(b *testing.B) {
	for _, c := range []struct{ blocks, targets int }{{2048, 8}, {2048, 64}, {8192, 8}, {8192, 64}} {
		for _, policy := range []Policy{NewDynamo(), NewPredictedLatency()} {
			b.Run(fmt.Sprintf("%T/%dx%d", policy, c.blocks, c.targets), func(b *testing.B) {
				decide(b, c.blocks, c.targets, policy, SplitNever)
			})
			b.Run(fmt.Sprintf("%T/%dx%d/apart", policy, c.blocks, c.targets), func(b *testing.B) {
				decide(b, c.blocks, c.targets, policy, SplitAuto)
			})
		}
	}
}

func decide(b *testing.B, blocks, n int, p Policy, phases SplitRule) {
	s := NewScheduler(Settings{})
	ids := make([]uint32, 16*blocks)
	for i := range ids {
		ids[i] = rand.Uint32N(100_000)
	}
	r := &Request{Prompt: cache.Prompt{Root: 1, BlockTokens: 16, Tokens: int64(len(ids)), Blocks: make([]uint64, blocks)}, Streamed: true}
	key := cache.TokenHash(testSeed)
	hash := func() {
		r.Blocks = key.AppendBlocks(r.Blocks[:0], ids, 16)
	}
	hash()
	root := cache.IdentityRoot(testSeed, 16, "", "")
	r.Identities = []cache.Identity{{BlockTokens: 16, Root: root, Blocks: r.Blocks}}
	ts := targets(n)
	for _, t := range ts {
		s.Declare(t, 1<<30)
		f := s.Caches().Feed(t)
		f.Describe(exactInfo)
		if n, why := f.Stored(&cache.Stored{Root: root, Names: r.Blocks, Blocks: r.Blocks}); n != blocks {
			b.Fatalf("outcome %d", why)
		}
	}
	refs := s.Refs(ts...)
	decode := refs
	sel := &Selection{Rand: seeded(1)}
	now := epoch
	for range 4 * n { // each target has had the prompt
		_, l := s.Select(now, r, refs, -1, p, sel)
		l.FirstToken(now)
		l.End(true, nil)
		now = now.Add(time.Second)
	}
	b.ReportAllocs()
	b.ResetTimer()
	least := time.Duration(math.MaxInt64) // on shared machines most are disturbed
	for b.Loop() {
		begin := time.Now()
		hash()
		if phases != SplitNever { // half of the targets prefill
			r.Phase, r.Split = PhasePrefill, Split{}
			r.Split = s.Forecast(now, r, refs[:n/2], p, phases, sel)
			r.Phase, decode = PhaseWhole, refs[n/2:]
		}
		i, l := s.Select(now, r, decode, -1, p, sel)
		if sel.Candidates[i].OverlapBlocks < float64(blocks-1) {
			b.Fatalf("overlap %v", sel.Candidates[i].OverlapBlocks)
		}
		l.FirstToken(now)
		l.End(true, nil)
		least = min(least, time.Since(begin))
		now = now.Add(time.Millisecond)
	}
	b.ReportMetric(float64(least.Nanoseconds()), "least-ns")
}
