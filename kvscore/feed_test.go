package kvscore

import (
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// fed is a scheduler with two targets. The engine of the first publishes events.
type fed struct {
	*Scheduler
	t       *testing.T
	targets []Target
	feed    *cache.Feed
	now     time.Time
}

const testSeed = 7

func newFed(t *testing.T, info cache.FeedInfo) *fed {
	f := &fed{
		Scheduler: NewScheduler(Settings{}), t: t, targets: []Target{{Worker: 1}, {Worker: 2}},
		now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	for _, target := range f.targets {
		f.Declare(target, 0)
	}
	f.feed = f.Caches().Feed(f.targets[0])
	f.feed.Describe(info)
	return f
}

// tokenPrompt returns a request with a number of blocks of 16 tokens, and a half one.
func tokenPrompt(blocks int, adapter, salt string) *Request {
	r := &Request{Prompt: cache.Prompt{Root: 1, BlockTokens: 16, Tokens: int64(blocks)*16 + 8}, Streamed: true}
	ids := make([]uint32, 16*blocks)
	for i := range blocks {
		ids[16*i] = uint32(i)
	}
	key := cache.TokenHash(testSeed)
	r.Blocks = key.AppendBlocks(nil, ids, 16)
	r.Identities = []cache.Identity{{
		BlockTokens: 16, Root: cache.IdentityRoot(testSeed, 16, adapter, salt), Blocks: r.Blocks, Adapter: adapter != "", Salted: salt != "",
	}}
	return r
}

// store has the engine hold the prompt's first blocks, named by their position.
func (f *fed) store(r *Request, blocks int) {
	f.t.Helper()
	b := &cache.Stored{Root: r.Identities[0].Root, Blocks: r.Blocks[:blocks]}
	for i := range blocks {
		b.Names = append(b.Names, uint64(i)+1)
	}
	if n, why := f.feed.Stored(b); n != blocks {
		f.t.Fatalf("%d blocks are recorded: outcome %d", n, why)
	}
}

// look returns the first target's terms for the request.
func (f *fed) look(r *Request) Candidate {
	sel := Selection{Rand: seeded(1)}
	f.explainOf(f.now, r, f.targets, -1, new(LeastLoad), &sel)
	return sel.Candidates[0]
}

func (f *fed) wants(r *Request, tokens int64, k Knowledge) {
	f.t.Helper()
	if c := f.look(r); c.OverlapTokens != tokens || c.Knowledge != k {
		f.t.Errorf("overlap is %d tokens (%s), want %d (%s)", c.OverlapTokens, c.Knowledge, tokens, k)
	}
}

// silent lets the time pass in which events should tell what was computed.
func (f *fed) silent() { f.now = f.now.Add(time.Second) }

// sent books the request on the first target.
func (f *fed) sent(r *Request) *Lease {
	var sel Selection
	_, l := f.selectOf(f.now, r, f.targets, 0, new(LeastLoad), &sel)
	return l
}

var exactInfo = cache.FeedInfo{Knowledge: Exact, BlockTokens: 16, HitsInFlight: true}

func TestEventsReplaceTheApproximateModel(t *testing.T) {
	f := newFed(t, exactInfo)
	r := tokenPrompt(10, "", "")
	f.wants(r, 0, Exact)
	l := f.sent(r)
	l.FirstToken(f.now)
	l.End(true, nil)
	f.silent()
	f.wants(r, 0, Exact)
	f.store(r, 6)
	f.wants(r, 96, Exact)
	if n := f.feed.Removed(cache.Device, []uint64{5}); n != 0 {
		t.Errorf("%d names are unknown", n)
	}
	f.wants(r, 64, Exact)

	f.feed.Describe(cache.FeedInfo{})
	f.wants(r, 160, Approximate)
	f.feed.Describe(cache.FeedInfo{Knowledge: Partial, BlockTokens: 16})
	f.wants(r, 160, Approximate)
	f.feed.Describe(exactInfo)
	f.feed.Cleared()
	f.wants(r, 0, Exact)
	f.feed.Describe(cache.FeedInfo{})
	f.wants(r, 0, Approximate) // an engine that says so has lost its cache
}

func TestHowMuchCounts(t *testing.T) {
	r := tokenPrompt(10, "", "")
	f := newFed(t, cache.FeedInfo{Knowledge: Partial, BlockTokens: 16})
	f.store(r, 6)
	f.wants(r, 96, Partial) // a lower bound
	f = newFed(t, exactInfo)
	f.store(r, 10)
	r.Tokens = 160
	f.wants(r, 144, Exact) // the engine computes the last token
}

func TestAdaptersAndSaltsThatEventsDoNotName(t *testing.T) {
	f := newFed(t, exactInfo)
	for _, r := range []*Request{tokenPrompt(4, "adapter", ""), tokenPrompt(4, "", "salt")} {
		f.wants(r, 0, Approximate)
	}
	named := exactInfo
	named.Adapters, named.Salts = true, true
	f.feed.Describe(named)
	for _, r := range []*Request{tokenPrompt(4, "adapter", ""), tokenPrompt(4, "", "salt")} {
		f.wants(r, 0, Exact)
		f.store(r, 4)
		f.wants(r, 64, Exact)
		f.wants(tokenPrompt(4, "", ""), 0, Exact)
		f.feed.Reset()
	}
	if cache.IdentityRoot(1, 16, "ab", "c") == cache.IdentityRoot(1, 16, "a", "bc") {
		t.Error("adapter and salt run together")
	}
}

func TestPromptsInFlight(t *testing.T) {
	t.Run("until they end", func(t *testing.T) {
		f := newFed(t, exactInfo)
		f.feed.Cleared()
		empty := f.Caches().Size().ExactBytes
		r := tokenPrompt(10, "", "")
		l := f.sent(r)
		f.wants(r, 160, Exact)
		f.wants(tokenPrompt(4, "", ""), 64, Exact)
		f.now = f.now.Add(time.Minute) // it waits in the engine
		f.wants(r, 160, Exact)
		f.feed.Cleared() // but for what requests use
		f.wants(r, 160, Exact)
		l.FirstToken(f.now)
		l.End(true, tokenPrompt(13, "", "").Blocks)
		next := tokenPrompt(14, "", "")
		f.wants(next, 208, Exact)
		f.silent()
		f.wants(next, 0, Exact)
		if f.Expire(f.now); f.Caches().Size().ExactBytes > empty {
			t.Error("what was computed is kept for ever")
		}
	})
	t.Run("whose events came before their end", func(t *testing.T) {
		f := newFed(t, exactInfo)
		r := tokenPrompt(10, "", "")
		l := f.sent(r)
		f.store(r, 10)
		l.FirstToken(f.now)
		l.End(true, nil)
		f.silent()
		f.wants(r, 160, Exact)
		f.feed.Removed(cache.Device, []uint64{4, 5, 6, 7, 8, 9, 10})
		f.wants(r, 48, Exact)
	})
	t.Run("of an engine that reuses finished prefills only", func(t *testing.T) {
		f := newFed(t, cache.FeedInfo{Knowledge: Exact, BlockTokens: 16})
		r := tokenPrompt(10, "", "")
		l := f.sent(r)
		f.wants(r, 0, Exact)
		l.FirstToken(f.now)
		f.wants(r, 160, Exact)
		f.silent()
		f.wants(r, 0, Exact)
	})
	t.Run("to an engine that loses its cache", func(t *testing.T) {
		f := newFed(t, exactInfo)
		r := tokenPrompt(10, "", "")
		l := f.sent(r)
		l.FirstToken(f.now)
		l.End(true, nil)
		f.wants(r, 160, Exact)
		f.feed.Cleared()
		f.wants(r, 0, Exact)
	})
	t.Run("in blocks of another size", func(t *testing.T) {
		f := newFed(t, cache.FeedInfo{Knowledge: Exact, BlockTokens: 32, HitsInFlight: true})
		r := tokenPrompt(10, "", "")
		r.Identities[0].BlockTokens, r.Identities[0].Blocks = 32, r.Blocks[:5]
		short := tokenPrompt(0, "", "")
		short.Identities = r.Identities
		f.sent(r)
		f.wants(r, 160, Exact)
		f.wants(short, 0, Exact)
	})
	t.Run("that failed", func(t *testing.T) {
		f := newFed(t, exactInfo)
		r := tokenPrompt(10, "", "")
		f.sent(r).End(false, nil)
		f.wants(r, 0, Exact)
		f.sent(r)
		f.wants(r, 160, Exact)
	})
}

func TestBlockSizesOfFeeds(t *testing.T) {
	f := newFed(t, cache.FeedInfo{BlockTokens: 16})
	if sizes := f.Caches().BlockSizes(); len(sizes) != 0 {
		t.Errorf("a feed that does not count has sizes %v", sizes)
	}
	f.feed.Describe(exactInfo)
	second := f.Caches().Feed(f.targets[1])
	second.Describe(cache.FeedInfo{Knowledge: Partial, BlockTokens: 32})
	if sizes := f.Caches().BlockSizes(); !slices.Equal(sizes, []int{16, 32}) {
		t.Errorf("sizes %v", sizes)
	}
	second.Close()
	f.feed.Close()
	if sizes := f.Caches().BlockSizes(); len(sizes) != 0 {
		t.Errorf("closed feeds have sizes %v", sizes)
	}
}

func TestNumbersOfClosedFeeds(t *testing.T) {
	f := newFed(t, exactInfo)
	r := tokenPrompt(4, "", "")
	f.store(r, 4)
	f.feed.Close()
	for i := range 10 {
		f.feed = f.Caches().Feed(f.targets[0])
		f.feed.Describe(exactInfo)
		f.wants(r, 0, Exact)
		if i%2 == 0 {
			f.store(r, 4)
		}
		f.feed.Close()
	}
}
