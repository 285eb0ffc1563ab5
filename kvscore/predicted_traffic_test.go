package kvscore

import (
	"slices"
	"testing"
	"time"
)

// declared returns a scheduler with so many idle targets that it knows.
func declared(n int) (*Scheduler, []Target) {
	s, ts := NewScheduler(Settings{}), targets(n)
	for _, t := range ts {
		s.Declare(t, 0)
	}
	return s, ts
}

// TestUnknownTargetsArePredicted offers targets that the scheduler does not know beside
// busy ones: unknown is neither zero nor idle.
func TestUnknownTargetsArePredicted(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(5)
	var live []*Lease
	for i, n := range []int{1, 2, 3} {
		for range n {
			_, l := s.Select(epoch, &Request{Tokens: 5000, Streamed: true}, ts, i, nil, &Selection{Rand: seeded(1)})
			live = append(live, l)
		}
	}
	sel := &Selection{Rand: seeded(1)}
	e := s.Explain(epoch, prompt(upTo(100)...), ts, -1, NewPredictedLatency(), sel)
	if e.Chosen != 0 || sel.Unknown != 2 {
		t.Errorf("chose %d, %d are unknown; want the least busy one", e.Chosen, sel.Unknown)
	}
	median := sel.Candidates[1]
	for i, c := range sel.Candidates[3:] {
		if c.Awaiting != 2 || c.WaitTime != median.WaitTime || c.RecentWork != median.RecentWork || c.Slowness != 1 ||
			!near(c.PrefillTime, s.latency.latency().Prefill(1600, 0, 0), 1e-9) || c.Cost != median.Cost {
			t.Errorf("unknown candidate %d: %+v, want the load of %+v", i, c, median)
		}
	}
	for _, l := range live {
		l.End(true, nil)
	}
	idle(t, s, ts, epoch)
}

// TestDryRunsChangeNothing has two schedulers do the same in virtual time, where one is
// asked to explain before each choice.
func TestDryRunsChangeNothing(t *testing.T) {
	asked, ts := declared(4)
	quiet, _ := declared(4)
	p, q := NewPredictedLatency(), NewPredictedLatency()
	rnd, at := seeded(11), epoch
	var live [][2]*Lease
	for i := range uint64(2000) {
		at = at.Add(time.Duration(rnd.IntN(2000)) * time.Millisecond)
		r := prompt(upTo(rnd.Uint64N(300))...)
		r.Root, r.Streamed, r.Home = rnd.Uint64N(20), rnd.IntN(4) > 0, ts[rnd.IntN(4)]
		var explained, a, b Selection
		explained.Rand, a.Rand, b.Rand = seeded(i), seeded(i), seeded(i)
		e := asked.Explain(at, r, ts, -1, p, &explained)
		got, l := asked.Select(at, r, ts, -1, p, &a)
		want, m := quiet.Select(at, r, ts, -1, q, &b)
		if got != want || e.Chosen != got {
			t.Fatalf("choice %d: %d after it was explained as %d, %d otherwise", i, got, e.Chosen, want)
		}
		for j, c := range a.Candidates {
			if c.Target != ts[j] || c != b.Candidates[j] || c != explained.Candidates[j] {
				t.Fatalf("choice %d, candidate %d: %+v, explained %+v, %+v otherwise", i, j, c, explained.Candidates[j], b.Candidates[j])
			}
			if !near(c.Cost, c.Terms.sum(), 1e-9) || c.Cost < 0 {
				t.Fatalf("choice %d, candidate %d: cost %v of %+v", i, j, c.Cost, c.Terms)
			}
		}
		live = append(live, [2]*Lease{l, m})
		k := rnd.IntN(len(live))
		first, end := rnd.IntN(3) > 0, len(live) > 8 || rnd.IntN(3) > 0
		at = at.Add(time.Duration(rnd.IntN(500)) * time.Millisecond)
		for _, l := range live[k] {
			if first {
				l.FirstToken(at)
			}
			if end {
				l.End(first, nil)
			}
		}
		if end {
			live = slices.Delete(live, k, k+1)
		}
	}
}

// serve has an engine answer a lease, for which it computes so many tokens.
func serve(l *Lease, at *time.Time, tokens int64) {
	*at = at.Add(time.Duration(10+tokens/10) * time.Millisecond)
	l.FirstToken(*at)
	l.Output(*at, 50)
	*at = at.Add(time.Second)
	l.End(true, nil)
}

// TestConversationsWithOneStem has conversations that begin with the same stem arrive
// at once. They do not all go where the first one went, and their next turns stay.
func TestConversationsWithOneStem(t *testing.T) {
	s, ts := declared(4)
	p, sel, at := NewPredictedLatency(), &Selection{Rand: seeded(5)}, epoch
	turn := func(c int, blocks int) []uint64 { return slices.Concat(upTo(100), distinct(uint64(c), blocks)) }
	home, served := make([]int, 40), make([]int, len(ts))
	var live []*Lease
	for c := range home {
		i, l := s.Select(at, prompt(turn(c, 100)...), ts, -1, p, sel)
		home[c] = i
		served[i]++
		live = append(live, l)
	}
	if slices.Max(served) > 30 {
		t.Errorf("conversations by target: %v", served)
	}
	for _, l := range live {
		serve(l, &at, 1600)
	}
	for c := range home {
		i, l := s.Select(at, prompt(turn(c, 120)...), ts, -1, p, sel)
		if serve(l, &at, 320); i != home[c] {
			t.Errorf("turn 2 of conversation %d went to %d, want %d", c, i, home[c])
		}
	}
	idle(t, s, ts, at)
}
