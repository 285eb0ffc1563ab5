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

// BenchmarkLearning is the router's work for requests of 128 blocks of text, half of them new, with answers of
// 20 blocks. With learning, events of the same requests teach the router their token blocks.
func BenchmarkLearning(b *testing.B) {
	for _, learns := range []bool{false, true} {
		b.Run(fmt.Sprint(learns), func(b *testing.B) { learnTexts(b, learns) })
	}
}

func learnTexts(b *testing.B, learns bool) {
	const prompt, answer, underWay = 128, 20, 16
	s := NewScheduler(Settings{})
	ratios := new(Ratios)
	ts := targets(1)
	s.Declare(ts[0], 1<<22)
	feed := s.Caches().Feed(ts[0])
	feed.Describe(exactInfo)
	root := cache.IdentityRoot(testSeed, 16, "", "")
	type call struct {
		r      *Request
		l      *Lease
		blocks []uint64
	}
	var calls []call
	now, n := epoch, uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		n++
		blocks := make([]uint64, prompt+answer)
		for i := range blocks {
			blocks[i] = cache.Mix(uint64(i)) &^ cache.KindMask
			if i >= prompt/2 {
				blocks[i] = cache.Mix(n<<20|uint64(i)) &^ cache.KindMask
			}
		}
		r := &Request{Prompt: cache.Prompt{Root: 1, BlockTokens: 16, Tokens: 16 * prompt, Weights: ratios.Weights("m", 64), Blocks: blocks[:prompt]}, Streamed: true}
		if learns {
			r.Identities = []cache.Identity{{BlockTokens: 16, Root: root}}
		}
		var sel Selection
		_, l := s.Select(now, r, ts, 0, new(LeastLoad), &sel)
		from := prompt / 2
		if n == 1 {
			from = 0
		}
		store := func(from, to int) {
			e := &cache.Stored{Root: root, Names: blocks[from:to], Blocks: blocks[from:to]}
			if from > 0 {
				e.Parent, e.HasParent = blocks[from-1], true
			}
			feed.Stored(e)
		}
		store(from, prompt)
		l.FirstToken(now)
		for i := prompt; i < prompt+answer; i++ {
			store(i, i+1)
		}
		calls = append(calls, call{r, l, blocks})
		if len(calls) == underWay {
			c := calls[0]
			calls = calls[1:]
			c.l.Counted(Counts{Prompt: 16*prompt + 1, Cached: 16 * prompt / 2, CachedReported: true, Answer: 16*(prompt+answer) + 1})
			c.l.End(true, c.blocks)
		}
		now = now.Add(20 * time.Millisecond)
	}
}
