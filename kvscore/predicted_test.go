package kvscore

import (
	"math"
	"testing"
	"time"
)

// three returns a selection among three candidates that are alike, for a prompt of
// 1,000 tokens, with no request waiting. Answers are ten times as long as DefaultWeight.
func three() *Selection {
	s := &Selection{
		Findings: Findings{Tokens: 1000}, BlockSize: 16, Rand: seeded(1), BoundTarget: -1, MeanAnswer: 10 * DefaultWeight,
		Latency: Latency{Fixed: 10, Token: 0.1, Attention: 1e-6, Context: 1e-4},
	}
	for i := range 3 {
		s.Candidates = append(s.Candidates, Candidate{Target: Target{Worker: uint64(i)}, Slowness: 1, PrefillTime: 100})
	}
	return s
}

// idleTerms are the terms of each candidate of three, busyTerms those of one with a request.
var (
	idleTerms = Terms{Prefill: 100}
	busyTerms = Terms{Prefill: 100, Stall: 0.1 * (100 - 10)}
)

func (t Terms) near(o Terms) bool {
	a := [...]float64{t.Wait, t.Prefill, t.Delay, t.Decode, t.Stall, t.Spread, t.Leave}
	b := [...]float64{o.Wait, o.Prefill, o.Delay, o.Decode, o.Stall, o.Spread, o.Leave}
	for i := range a {
		if !(math.Abs(a[i]-b[i]) <= 1e-9*(1+math.Abs(b[i]))) {
			return false
		}
	}
	return true
}

func pointer[T any](v T) *T { return &v }

// TestTerms changes one thing of the second candidate, or of the selection, and looks
// at the terms of the first candidate and of the second. The numbers are computed from
// what Terms and the constants say, all in milliseconds.
func TestTerms(t *testing.T) {
	// an answer of 200 tokens behind 1,000: alone, and what it adds to another one
	const own, added = DefaultWeight * (10 + 0.1), 0.1 * 200 * (0.1 + 1e-4*(1000+100))
	// what a bound target with 800 tokens of the prompt would have to compute
	const held = 10 + 800*0.1 + 1e-6*800*400
	for name, tc := range map[string]struct {
		change func(s *Selection, c *Candidate)
		want   func(first, second *Terms) // nil: as idle ones
	}{
		"nothing": {func(*Selection, *Candidate) {}, nil},
		"wait": {
			func(_ *Selection, c *Candidate) { c.WaitTime, c.Requests = 70, 1 },
			func(_, second *Terms) { *second = busyTerms; second.Wait = 70 },
		},
		"prefill": {
			func(_ *Selection, c *Candidate) { c.PrefillTime = 60 },
			func(_, second *Terms) { second.Prefill = 60 },
		},
		"delay by requests that wait there": {
			func(_ *Selection, c *Candidate) { c.Awaiting, c.Requests = 3, 3 },
			func(_, second *Terms) {
				second.Delay, second.Stall = (100-10)*3*delayQueue, 3*0.1*(100-10)
			},
		},
		"delay by memory that the prompt takes": {
			func(_ *Selection, c *Candidate) { c.memory, c.Awaiting, c.Requests = 300, 2, 2 },
			func(_, second *Terms) {
				second.Delay, second.Stall = (100-10+300)*2*delayQueue, 2*0.1*(100-10)
			},
		},
		// 5 requests per second come to a target
		"delay of requests that come meanwhile": {
			func(s *Selection, c *Candidate) { s.ArrivalRate, c.OverlapTokens, c.PrefillTime = 0.005, 500, 50 },
			func(first, second *Terms) { first.Delay, second.Prefill, second.Delay = 0.005*90*90, 50, 0.005*40*40 },
		},
		"decode": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer, c.Requests, c.Slowness = 200, 4, 2 },
			func(first, second *Terms) {
				first.Decode, second.Decode = own, 2/noise*(own+4*added)
				second.Stall = 4 * 0.1 * (100 - 2*10)
			},
		},
		"short answers count in full": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer, s.MeanAnswer, c.Requests = 4, 4, 1 },
			func(first, second *Terms) {
				first.Decode = 4 * (10 + 0.1)
				second.Decode, second.Stall = first.Decode+4*(0.1+1e-4*(1000+2)), 100-10
			},
		},
		// One of two later requests comes to it, and gains half of the wait. The prefix is shorter than estimated.
		"spread": {
			func(s *Selection, c *Candidate) {
				s.SharedTokens, s.SharedArrivals, s.SharedHolders = 540, 2, 1
				c.OverlapTokens, c.WaitTime, c.PrefillTime, c.RecentWork, c.Requests = 500, 40, 10, 1000, 1
			},
			func(first, second *Terms) {
				first.Spread = -1 * 40. / 2
				*second = Terms{Wait: 40, Prefill: 10}
			},
		},
		"spread that costs more than the copy": {
			func(s *Selection, c *Candidate) {
				s.SharedTokens, s.SharedArrivals, s.SharedHolders = 500, 100, 1
				c.OverlapTokens, c.WaitTime, c.PrefillTime, c.RecentWork, c.Requests = 500, 40, 10, 1000, 1
			},
			func(first, second *Terms) {
				first.Spread = -100 / 2
				*second = Terms{Wait: 40, Prefill: 10}
			},
		},
		"an idle target beside a longer wait": {
			func(s *Selection, c *Candidate) {
				s.Candidates = s.Candidates[:2]
				s.ArrivalRate, c.WaitTime, c.PrefillTime, c.Requests = 0.01, 110, 10, 1
			},
			func(first, second *Terms) {
				*second = Terms{Wait: 110, Prefill: 10}
				first.Delay, first.Spread = 0.01*90*90, -0.01*90*90-100+110+10
			},
		},
		"a bound target that is far busier": {
			func(s *Selection, c *Candidate) {
				s.BoundTarget, c.OverlapTokens, c.WaitTime, c.Requests = 1, 800, 1000, 1
			},
			func(first, second *Terms) { *second = busyTerms; first.Leave, second.Wait = leavePrice*held, 1000 },
		},
		"a bound target that holds what all hold": {
			func(s *Selection, c *Candidate) {
				s.BoundTarget, c.OverlapTokens, s.Candidates[0].OverlapTokens = 1, 500, 500
			},
			func(first, _ *Terms) { first.Leave = leavePrice * 10 },
		},
		"a bound target that holds nothing": {func(s *Selection, _ *Candidate) { s.BoundTarget = 1 }, func(first, _ *Terms) { first.Leave = leavePrice * 10 }},
		"a high priority": {
			func(s *Selection, c *Candidate) { s.Priority, c.WaitTime, c.Requests = 5, 70, 1 },
			func(first, second *Terms) {
				*second = busyTerms
				first.Prefill, second.Wait, second.Prefill = urgent*100, urgent*70, urgent*100
			},
		},
		"a low priority": {
			func(s *Selection, c *Candidate) { s.Priority, c.WaitTime, c.Requests = -5, 70, 1 },
			func(first, second *Terms) {
				*second = busyTerms
				first.Prefill, second.Wait, second.Prefill = 100/urgent, 70/urgent, 100/urgent
			},
		},
		// half of the 400 cached tokens are computed again, on a target twice as slow
		"credit": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{OverlapScoreCredit: pointer(0.5)}
				c.OverlapTokens, c.Slowness = 400, 2
			},
			func(_, second *Terms) { second.Prefill = 140 },
		},
		"a credit above 1": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{OverlapScoreCredit: pointer(3.)}
				c.OverlapTokens = 400
			},
			nil,
		},
		"scale": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{PrefillLoadScale: pointer(3.)}
				s.ExpectedAnswer, c.Requests, c.WaitTime, c.Awaiting = 200, 4, 70, 1
			},
			func(first, second *Terms) {
				*first = Terms{Prefill: 300, Decode: own}
				*second = Terms{
					Wait: 210, Prefill: 300, Delay: 3 * (100 - 10) * delayQueue, Decode: own + 4*added, Stall: 4 * 0.1 * (100 - 10),
				}
			},
		},
		"no prefill tokens": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{TrackPrefillTokens: pointer(false)}
				c.WaitTime, c.Requests = 70, 1
			},
			func(_, second *Terms) { *second = busyTerms },
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := three()
			tc.change(s, &s.Candidates[1])
			want := [2]Terms{idleTerms, idleTerms}
			if tc.want != nil {
				tc.want(&want[0], &want[1])
			}
			i := NewPredictedLatency().Choose(s)
			for k, w := range want {
				c := &s.Candidates[k]
				if !c.Terms.near(w) || !near(c.Cost, c.Terms.sum(), 1e-9) {
					t.Errorf("candidate %d has %+v, cost %v; want %+v", k, c.Terms, c.Cost, w)
				}
				if c.Cost < s.Candidates[i].Cost {
					t.Errorf("chose %d, %d is cheaper", i, k)
				}
			}
		})
	}
}

func TestBoundTargetHolds(t *testing.T) {
	for name, tc := range map[string]struct {
		bound       int
		holds, most int64
		want        bool
	}{
		"not bound":                {-1, 800, 800, false},
		"no target holds anything": {1, 0, 0, false},
		"it holds most":            {1, 800, 800, true},
		"it holds half as much":    {1, 400, 800, true},
		"it holds less":            {1, 384, 800, false},
		"it holds nothing":         {1, 0, 800, false},
		"it alone holds a block":   {1, 16, 0, true},
	} {
		s := three()
		s.BoundTarget = tc.bound
		s.Candidates[0].OverlapTokens, s.Candidates[1].OverlapTokens, s.Candidates[2].OverlapTokens = 0, tc.holds, tc.most
		if got := s.BoundTargetHolds(); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestTargetsTakeTurns has a second target that costs 20 ms more than the first one, and got its last
// request before it.
func TestTargetsTakeTurns(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(first, second *Candidate)
		want   int
	}{
		"alike":                 {func(_, _ *Candidate) {}, 1},
		"idle":                  {func(a, b *Candidate) { a.Requests, b.Requests = 0, 0 }, 0},
		"more requests":         {func(_, b *Candidate) { b.Requests = 13 }, 0},
		"many steps dearer":     {func(_, b *Candidate) { b.PrefillTime = 150 }, 0},
		"a longer wait":         {func(_, b *Candidate) { b.WaitTime = 1 }, 0},
		"less of the prompt":    {func(a, _ *Candidate) { a.OverlapTokens = 16 }, 0},
		"slower":                {func(_, b *Candidate) { b.Slowness = 1.3 }, 0},
		"little memory":         {func(_, b *Candidate) { b.full = 0.8 }, 0},
		"a client's hint":       {func(_, b *Candidate) { b.Factor = 1 }, 0},
		"another router's":      {func(_, b *Candidate) { b.Others = true }, 0},
		"an outlier":            {func(_, b *Candidate) { b.Outlier = true }, 0},
		"one that just got one": {func(_, b *Candidate) { b.rested = 0 }, 0},
	} {
		s := three()
		s.Candidates = s.Candidates[:2]
		a, b := &s.Candidates[0], &s.Candidates[1]
		a.Requests, b.Requests, a.step, b.step, b.PrefillTime, b.rested = 10, 10, 10, 10, 110, time.Second
		tc.change(a, b)
		if at := NewPredictedLatency().Choose(s); at != tc.want || s.Candidates[at].Cost > s.Candidates[1-at].Cost {
			t.Errorf("%s: chose %d at %v and %v ms", name, at, a.Cost, b.Cost)
		}
	}
}

// TestEqualIdleTargetsTakeTurns has a bound target with a wait, and two idle targets that cost the same.
func TestEqualIdleTargetsTakeTurns(t *testing.T) {
	for want := 1; want <= 2; want++ {
		s := three()
		s.BoundTarget = 0
		for i := range s.Candidates {
			s.Candidates[i].PrefillTime = 190
		}
		bound := &s.Candidates[0]
		bound.Requests, bound.WaitTime, bound.PrefillTime, bound.OverlapTokens = 1, 195, 1, 4000
		s.Candidates[want].rested = time.Second
		if at := NewPredictedLatency().Choose(s); at != want {
			t.Errorf("chose %d, and %d has rested longest", at, want)
		}
	}
}

// TestPromptsTakeMemory has two targets, each with an active prompt of half its memory. Another request
// has the first prompt, so it would take the memory of the second target only.
func TestPromptsTakeMemory(t *testing.T) {
	for capacity, want := range map[int64]bool{3500: true, 100_000: false} {
		s, ts, sel := NewScheduler(Settings{}), targets(2), &Selection{Rand: seeded(1)}
		for i, blocks := range [][]uint64{upTo(100), upTo(300)[200:], upTo(101)} {
			s.Declare(ts[i%2], capacity)
			s.selectOf(epoch, prompt(blocks...), ts, i%2, nil, sel)
		}
		held, copied := sel.Candidates[0].memory, sel.Candidates[1].memory
		s.explainOf(epoch, prompt(upTo(500)[400:]...), targets(3), -1, NewPredictedLatency(), sel)
		if known, unknown := sel.Candidates[1].memory, sel.Candidates[2].memory; known > 0 != want || unknown < known {
			t.Errorf("%d tokens: %.2g ms at a known target, %.2g at an unknown one", capacity, known, unknown)
		}
		if matters := copied > 100; matters != want || held > copied/50 {
			t.Errorf("%d tokens: the prompt takes the memory for %.2g ms where it is held, else for %.2g", capacity, held, copied)
		}
	}
}
