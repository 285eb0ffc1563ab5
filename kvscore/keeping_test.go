package kvscore

import (
	"fmt"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// resets are conversations with an engine that loses its cache between their turns.
type resets struct {
	talks    int    // conversations
	ordered  bool   // their turns come in the same order each time
	capacity int64  // of the engine, in tokens, as it reports it
	at       []int  // the turns before which the cache is lost
	shared   bool   // a long system prompt is in use by another request, which began before
	first    int    // turns of the conversations before the others: 0 is one
	want     string // the turns in which the loss is noticed
}

// TestLostCacheIsNoSmallCache has engines lose their caches without a word. The scheduler notices each
// loss, keeps what was computed since, and learns no capacity from it.
func TestLostCacheIsNoSmallCache(t *testing.T) {
	for name, tc := range map[string]resets{
		"twice, in one order":         {talks: 12, ordered: true, capacity: 131_072, at: []int{2, 5}, want: "[2 5]"},
		"twice, in any order":         {talks: 12, capacity: 131_072, at: []int{2, 5}, want: "[2 5]"},
		"one soon after another":      {talks: 12, capacity: 131_072, at: []int{2, 3, 6}, want: "[2 3 6]"},
		"three conversations":         {talks: 3, ordered: true, capacity: 131_072, at: []int{2, 4, 6}, want: "[2 4 6]"},
		"each time, for many turns":   {talks: 12, ordered: true, capacity: 131_072, at: []int{2, 4, 6, 8, 10, 12, 14}, want: "[2 4 6 8 10 12 14]"},
		"a cache that is nearly full": {talks: 40, capacity: 48_000, at: []int{2, 5}, want: "[2 5]"},
		"a shared system prompt":      {talks: 12, capacity: 131_072, at: []int{2, 5}, shared: true, want: "[2 5]"},
		"before any prompt was kept":  {talks: 12, ordered: true, capacity: 131_072, at: []int{1}, want: "[]"},
		"never":                       {talks: 12, capacity: 131_072, want: "[]"},
	} {
		for seed := range uint64(5) {
			s, ts := declared(1)
			s.Declare(ts[0], tc.capacity)
			noticed := []int{}
			turn, wrong := 0, 0
			s.OnLost(func(at Target, tokens int64) {
				if at != ts[0] || tokens == 0 {
					t.Errorf("%s: %d tokens of %v are lost", name, tokens, at)
				}
				noticed = append(noticed, turn)
			})
			engine, rnd := newServed(tc.capacity), seeded(seed)
			talks := make([][]uint64, tc.talks)
			if tc.shared {
				for i := range talks {
					talks[i] = distinct(99, 20)
				}
				book(s, ts, 20, epoch) // unrelated
				_, l := s.selectOf(epoch, prompt(talks[0]...), ts, 0, nil, &Selection{Rand: rnd})
				l.FirstToken(epoch)
				defer l.End(true, nil)
				engine.serve(prompt(talks[0]...), nil)
			}
			for turn = range 16 {
				for _, at := range tc.at {
					if at == turn {
						engine.slot.Lose()
					}
				}
				order := rnd.Perm(tc.talks)
				for k := range order {
					i := order[k]
					if tc.ordered {
						i = k
					}
					n := 4
					if turn == 0 {
						n = 50
					}
					talks[i] = append(talks[i], distinct(rnd.Uint64(), n)...)
					r := prompt(talks[i]...)
					talks[i] = append(talks[i], distinct(rnd.Uint64(), 2)...)
					_, l := s.selectOf(epoch, r, ts, 0, nil, &Selection{Rand: rnd})
					cached := engine.serve(r, talks[i])
					if l.cached != cached {
						wrong++
					}
					l.FirstToken(epoch)
					l.Counted(Counts{Prompt: r.Tokens, Cached: cached, CachedReported: true})
					l.End(true, talks[i])
				}
			}
			if got := fmt.Sprint(noticed); got != tc.want {
				t.Errorf("%s, seed %d: noticed in the turns %v, want %v", name, seed, got, tc.want)
			}
			if most := 12 * len(tc.at); wrong > most {
				t.Errorf("%s, seed %d: %d predictions are wrong, want at most %d", name, seed, wrong, most)
			}
			if got := capacity(s, ts[0]); got < 0.9*float64(tc.capacity) {
				t.Errorf("%s, seed %d: learned a capacity of %v tokens, of %d", name, seed, got, tc.capacity)
			}
		}
	}
}

// TestRecalledCacheIsLost has another run of the router recall what the engine has lost meanwhile.
func TestRecalledCacheIsLost(t *testing.T) {
	s, ts := declared(1)
	s.Declare(ts[0], 100_000)
	lost := 0
	s.OnLost(func(Target, int64) { lost++ })
	for i := range uint64(6) {
		s.Caches().Recall(ts[0], &cache.Past{Root: 1, Blocks: distinct(i, 50), Weight: 16_000, Matched: -1})
	}
	for i := range uint64(fewLost) {
		_, l := s.selectOf(epoch, prompt(distinct(i, 50)...), ts, 0, nil, new(Selection))
		if l.cached == 0 {
			t.Fatal("nothing is recalled")
		}
		l.FirstToken(epoch)
		l.Counted(Counts{Prompt: 800, CachedReported: true})
		l.End(true, nil)
	}
	if got := capacity(s, ts[0]); lost != 1 || got != 100_000 {
		t.Errorf("%d losses are noticed, the capacity is %v", lost, got)
	}
}

// TestClearedCacheKeepsWhatIsInFlight has an engine's event say that its cache was emptied. It comes
// after the first requests that the engine computes anew, which stay.
func TestClearedCacheKeepsWhatIsInFlight(t *testing.T) {
	s, ts := declared(1)
	s.Declare(ts[0], 100_000)
	f := s.Caches().Feed(ts[0])
	send := func(seed uint64) *Lease {
		_, l := s.selectOf(epoch, prompt(distinct(seed, 100)...), ts, 0, nil, new(Selection))
		return l
	}
	held := func(seed uint64) int64 {
		var v cache.View
		p := prompt(distinct(seed, 100)...).Prompt
		p.Weights = cache.Same(16_000)
		s.Caches().Look(epoch, &p, &v)
		return v.Of(s.targets[ts[0]].slot).OverlapTokens
	}
	send(1).End(true, nil)
	send(2).End(true, nil)
	again, fresh := send(2), send(3)
	f.Cleared()
	for _, l := range []*Lease{again, fresh} {
		l.FirstToken(epoch)
		l.Counted(Counts{Prompt: 1600, CachedReported: true})
		l.End(true, nil)
	}
	if held(1) != 0 || held(2) == 0 || held(3) == 0 {
		t.Errorf("%d tokens of the prompt before, %d and %d of those in flight", held(1), held(2), held(3))
	}
	if got := capacity(s, ts[0]); got != 100_000 {
		t.Errorf("learned a capacity of %v tokens", got)
	}
}
