package kvscore

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// served is the KV cache of an engine, which reports what of a prompt it had cached.
type served struct {
	caches *cache.Caches
	slot   *cache.Slot
	view   cache.View
}

func newServed(tokens int64) *served {
	e := &served{caches: cache.New(1<<30, 16)}
	e.slot = e.caches.Open(Target{}, tokens)
	return e
}

// serve computes a prompt and its answer, and returns what of the prompt was cached.
func (e *served) serve(r *Request, answer []uint64) (cached int64) {
	p := r.Prompt
	p.Weights = cache.Same(int64(r.BlockTokens * 1000))
	now := time.Unix(0, 0)
	e.caches.Look(now, &p, &e.view)
	cached = e.view.Of(e.slot).OverlapTokens
	var t cache.Ticket
	e.caches.Book(now, &t, e.slot, &p, &e.view)
	t.End(now, true, answer, Counts{})
	return cached
}

// talk sends turns of 60 conversations, which together have about twice the tokens of
// an engine, to a target that is declared with another capacity.
func talk(s *Scheduler, ts []Target, c *served, rnd *rand.Rand, turns int) {
	var talks [60][]uint64
	sel := &Selection{Rand: rnd}
	for range turns {
		// some come back soon, some late
		i := min(rnd.IntN(len(talks)), rnd.IntN(len(talks)))
		if len(talks[i]) > 400 {
			talks[i] = nil
		}
		talks[i] = append(talks[i], distinct(rnd.Uint64(), 20)...)
		r := prompt(talks[i]...)
		talks[i] = append(talks[i], distinct(rnd.Uint64(), 10)...)
		_, l := s.selectOf(epoch, r, ts, 0, nil, sel)
		cached := c.serve(r, talks[i])
		l.FirstToken(epoch)
		l.Counted(Counts{Prompt: r.Tokens, Cached: cached, CachedReported: true})
		l.End(true, talks[i])
	}
}

func capacity(s *Scheduler, t Target) float64 {
	load, _ := s.Load(epoch, t)
	return float64(load.CapacityTokens)
}

func TestCapacityIsLearned(t *testing.T) {
	const is = 100_000
	for name, tc := range map[string]struct {
		declared int64
		low, up  float64
	}{
		"declared rightly":           {is, 0.9, 1.1},
		"declared 8 times too much":  {8 * is, 0.75, 1.25},
		"declared 8 times too small": {is / 8, 0.75, 1.25},
		"declared twice too much":    {2 * is, 0.75, 1.25},
		"declared half of it":        {is / 2, 0.75, 1.25},
	} {
		for seed := range uint64(3) {
			s, ts := declared(1)
			s.Declare(ts[0], tc.declared)
			c, rnd := newServed(is), seeded(seed)
			talk(s, ts, c, rnd, 3000)
			for range 4 { // and it stays
				if got := capacity(s, ts[0]) / is; got < tc.low || got > tc.up {
					t.Errorf("%s, seed %d: learned %.2f times what it is", name, seed, got)
				}
				talk(s, ts, c, rnd, 500)
			}
			if load, _ := s.Load(epoch, ts[0]); load.ReportedTokens != tc.declared {
				t.Errorf("%s: declared %d", name, load.ReportedTokens)
			}
			idle(t, s, ts, epoch)
		}
	}
}

func TestLearnedCapacityIsBounded(t *testing.T) {
	s, ts := declared(1)
	s.Declare(ts[0], 16_000)
	sel := &Selection{}
	report := func(i uint64, cached int64) {
		r := prompt(distinct(i%7, 500)...) // 8,000 tokens
		_, l := s.selectOf(epoch, r, ts, 0, nil, sel)
		l.FirstToken(epoch)
		l.Counted(Counts{Prompt: r.Tokens, Cached: cached, CachedReported: true})
		l.End(true, nil)
	}
	for i := range uint64(2000) {
		report(i/2, 7999)
	}
	if got := capacity(s, ts[0]); got > 16_000*maxCapacityChange {
		t.Errorf("capacity %v of an engine that always has all", got)
	}
	for i := range uint64(2000) {
		report(i/2, 0)
	}
	if got := capacity(s, ts[0]); got < 16_000/maxCapacityChange {
		t.Errorf("capacity %v of an engine that never has anything", got)
	}
}

// TestWhatTeachesNoCapacity has an engine that reports nothing cached of a prompt that
// the cache model has whole, for reasons that say nothing of its capacity.
func TestWhatTeachesNoCapacity(t *testing.T) {
	const declaredTokens = 100_000
	for name, tc := range map[string]struct {
		do   func(s *Scheduler, ts []Target, send func() *Lease, end func(l *Lease))
		less bool
	}{
		"it may be lost": {func(_ *Scheduler, _ []Target, send func() *Lease, end func(*Lease)) {
			end(send())
		}, false},
		"it was evicted again and again": {func(_ *Scheduler, _ []Target, send func() *Lease, end func(*Lease)) {
			for range 1 + fewDoubted {
				end(send())
			}
		}, true},
		"events tell of the engine's cache": {func(s *Scheduler, ts []Target, send func() *Lease, end func(*Lease)) {
			s.Caches().Feed(ts[0]).Describe(cache.FeedInfo{Knowledge: Exact, BlockTokens: 16})
			for range 1 + fewDoubted {
				end(send())
			}
		}, false},
		"it waited behind others": {func(s *Scheduler, ts []Target, send func() *Lease, end func(*Lease)) {
			other := book(s, ts, 1000, epoch)
			end(send())
			other.End(false, nil)
		}, false},
		"it was being computed": {func(_ *Scheduler, _ []Target, send func() *Lease, end func(*Lease)) {
			first := send()
			first.FirstToken(epoch)
			end(send())
			first.End(true, nil)
		}, false},
		"the target restarted": {func(s *Scheduler, ts []Target, send func() *Lease, end func(*Lease)) {
			l := send()
			s.Clear(ts[0])
			end(l)
		}, false},
		"it failed": {func(_ *Scheduler, _ []Target, send func() *Lease, _ func(*Lease)) {
			l := send()
			l.FirstToken(epoch)
			l.Counted(Counts{Prompt: 16_000, CachedReported: true})
			l.End(false, nil)
		}, false},
		"nothing was reported": {func(_ *Scheduler, _ []Target, send func() *Lease, _ func(*Lease)) {
			l := send()
			l.Counted(Counts{Prompt: 16_000})
			l.End(true, nil)
		}, false},
	} {
		s, ts := declared(1)
		s.Declare(ts[0], declaredTokens)
		send := func() *Lease {
			_, l := s.selectOf(epoch, prompt(upTo(1000)...), ts, 0, nil, &Selection{Rand: seeded(1)})
			return l
		}
		send().End(true, nil)
		tc.do(s, ts, send, func(l *Lease) {
			l.FirstToken(epoch)
			l.Counted(Counts{Prompt: 16_000, CachedReported: true})
			l.End(true, nil)
		})
		if got := capacity(s, ts[0]); (got < declaredTokens) != tc.less || got > declaredTokens {
			t.Errorf("%s: capacity %v of %d declared", name, got, declaredTokens)
		}
		idle(t, s, ts, epoch)
	}
}

func TestDeclareKeepsWhatWasLearned(t *testing.T) {
	s, ts := declared(1)
	s.Declare(ts[0], 800_000)
	talk(s, ts, newServed(100_000), seeded(1), 2000)
	learned := capacity(s, ts[0])
	if learned > 200_000 {
		t.Fatalf("learned %v", learned)
	}
	s.Declare(ts[0], 800_000)
	if got := capacity(s, ts[0]); got != learned {
		t.Errorf("capacity %v after the same was declared, want the learned %v", got, learned)
	}
	s.Clear(ts[0])
	if got := capacity(s, ts[0]); got != learned {
		t.Errorf("capacity %v after a restart, want the learned %v", got, learned)
	}
	s.Declare(ts[0], 400_000)
	if got := capacity(s, ts[0]); got != 400_000 {
		t.Errorf("capacity %v after another was declared, want that", got)
	}
}
