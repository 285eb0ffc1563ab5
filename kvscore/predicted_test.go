package kvscore

import (
	"math"
	"slices"
	"testing"
)

// three returns a selection among three candidates that are alike, for a prompt of
// 1,000 tokens, with no request waiting.
func three() *Selection {
	s := &Selection{
		Tokens: 1000, BlockSize: 16, Rand: seeded(1), Home: -1,
		Latency: Latency{Fixed: 10, Token: 0.1, Attention: 1e-6, Context: 1e-4},
	}
	for i := range 3 {
		s.Candidates = append(s.Candidates, Candidate{Target: Target{Worker: uint64(i)}, Slowness: 1, PrefillTime: 100})
	}
	return s
}

// others is how many others wait for a prefill, where so many await their first token on
// a target on average.
func others(waiting float64) float64 {
	return delayAlone + delayLoad*waiting*waiting/(waiting+delayFew)
}

// idleTerms are the terms of each candidate of three.
var idleTerms = Terms{Prefill: 100, Delay: others(0) * 100}

func (t Terms) sum() float64 { return t.Wait + t.Prefill + t.Delay + t.Decode + t.Turns + t.Leave }

func (t Terms) near(o Terms) bool {
	a := [...]float64{t.Wait, t.Prefill, t.Delay, t.Decode, t.Turns, t.Leave}
	b := [...]float64{o.Wait, o.Prefill, o.Delay, o.Decode, o.Turns, o.Leave}
	for i := range a {
		if !(math.Abs(a[i]-b[i]) <= 1e-9*(1+math.Abs(b[i]))) {
			return false
		}
	}
	return true
}

func pointer[T any](v T) *T { return &v }

// TestTerms changes one thing of the second candidate, or of the selection, and looks
// at the terms of the second candidate and of the first. The numbers are computed from
// what Terms and the constants say, all in milliseconds.
func TestTerms(t *testing.T) {
	with := func(change func(*Terms)) Terms {
		terms := idleTerms
		change(&terms)
		return terms
	}
	// an answer of 200 tokens behind 1,000
	const decode = 200 * (0.1 + 1e-4*(1000+100))
	// what a home with 800 tokens of the prompt would have to compute
	const held = 800*0.1 + 1e-6*800*400
	for name, tc := range map[string]struct {
		change        func(s *Selection, c *Candidate)
		first, second Terms
		chosen        []int // any of them
	}{
		"nothing": {func(*Selection, *Candidate) {}, idleTerms, idleTerms, []int{0, 1, 2}},
		"wait": {
			func(_ *Selection, c *Candidate) { c.WaitTime = 70 },
			idleTerms, with(func(t *Terms) { t.Wait = 70 }),
			[]int{0, 2},
		},
		"prefill": {
			func(_ *Selection, c *Candidate) { c.PrefillTime = 60 },
			idleTerms,
			Terms{Prefill: 60, Delay: 60 * others(0)},
			[]int{1},
		},
		"delay by requests that wait anywhere": {
			func(s *Selection, _ *Candidate) { s.Awaiting = 6 },
			with(func(t *Terms) { t.Delay = 100 * (others(2)) }),
			with(func(t *Terms) { t.Delay = 100 * (others(2)) }),
			[]int{0, 1, 2},
		},
		"delay by requests that wait there": {
			func(_ *Selection, c *Candidate) { c.Awaiting = 3 },
			idleTerms, with(func(t *Terms) { t.Delay = 100 * (others(0) + 3*delayQueue) }),
			[]int{0, 2},
		},
		"decode": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer = 200; c.Requests = 4; c.Slowness = 2 },
			idleTerms, with(func(t *Terms) { t.Decode = 4 * 2 * decodeWorth * decode }),
			[]int{0, 2},
		},
		"decode beside prefills of three times its work": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer, s.MeanPrefill = 200, 3*decode; c.Requests = 4 },
			idleTerms, with(func(t *Terms) { t.Decode = 4 * decodeWorth / 4 * decode }),
			[]int{0, 2},
		},
		"decode behind many that wait for prefills": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer = 200; s.Awaiting = 3000; c.Requests = 4 },
			with(func(t *Terms) { t.Delay = 100 * (others(1000)) }),
			with(func(t *Terms) { t.Delay = 100 * (others(1000)); t.Decode = 4 * decodeWorth * decode }),
			[]int{0, 2},
		},
		"decode behind some that wait, with a half full memory": {
			func(s *Selection, c *Candidate) {
				s.ExpectedAnswer, s.Awaiting, c.Requests, c.MemoryUse = 200, 6, 4, (1+nearlyFull)/2
			},
			with(func(t *Terms) { t.Delay = 100 * (others(2)) }),
			with(func(t *Terms) {
				t.Delay, t.Decode = 100*(others(2)), 4*(decodeWorth+decodeLoad*2/2)*decode
			}),
			[]int{0, 2},
		},
		"decode behind many that wait, with full memory elsewhere": {
			func(s *Selection, c *Candidate) {
				s.ExpectedAnswer, s.Awaiting, c.Requests, s.Candidates[0].MemoryUse = 200, 3000, 4, 1.2
			},
			with(func(t *Terms) { t.Delay = 100 * (others(1000)) }),
			with(func(t *Terms) { t.Delay = 100 * (others(1000)); t.Decode = 4 * maxDecode * decode }),
			[]int{0, 2},
		},
		// the others have 30, 60 on average
		"turns": {
			func(s *Selection, c *Candidate) {
				s.ExpectedTurns, s.TurnTime = 3, 40
				s.Candidates[0].RecentWork, s.Candidates[2].RecentWork, c.RecentWork = 30, 30, 120
			},
			idleTerms, with(func(t *Terms) { t.Turns = turnsWorth * 3 * 40 * (120 - 30) / 60 }),
			[]int{0, 2},
		},
		"turns of what some target holds three quarters of": {
			func(s *Selection, c *Candidate) {
				s.ExpectedTurns, s.TurnTime = 3, 40
				s.Candidates[2].OverlapTokens = 750
				c.RecentWork = 120
			},
			idleTerms, with(func(t *Terms) { t.Turns = turnsWorth * 3 * 40 * 120 / 40 / 4 }),
			[]int{0, 2},
		},
		"turns of a prompt of which nothing is known": {
			func(s *Selection, c *Candidate) {
				s.Tokens, s.ExpectedTurns, s.TurnTime = 0, 3, 40
				c.RecentWork = 120
			},
			idleTerms, idleTerms,
			[]int{0, 1, 2},
		},
		"home": {
			func(s *Selection, c *Candidate) { s.Home, c.OverlapTokens = 1, 800 },
			with(func(t *Terms) { t.Leave = leavePrice * held }), idleTerms,
			[]int{1},
		},
		"a home that holds nothing": {
			func(s *Selection, _ *Candidate) { s.Home = 1 },
			idleTerms, idleTerms,
			[]int{0, 1, 2},
		},
		"a home that is far busier": {
			func(s *Selection, c *Candidate) { s.Home, c.OverlapTokens, c.WaitTime = 1, 800, 1000 },
			with(func(t *Terms) { t.Leave = leavePrice * held }), with(func(t *Terms) { t.Wait = 1000 }),
			[]int{0, 2},
		},
		"a high priority": {
			func(s *Selection, c *Candidate) { s.Priority = 5; c.WaitTime = 70 },
			with(func(t *Terms) { t.Prefill = urgent * 100 }),
			with(func(t *Terms) { t.Wait, t.Prefill = urgent*70, urgent*100 }),
			[]int{0, 2},
		},
		"a low priority": {
			func(s *Selection, c *Candidate) { s.Priority = -5; c.WaitTime = 70 },
			with(func(t *Terms) { t.Prefill = 100. / urgent }),
			with(func(t *Terms) { t.Wait, t.Prefill = 70./urgent, 100./urgent }),
			[]int{0, 2},
		},
		// half of the 400 cached tokens are computed again, on a target twice as slow
		"credit": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{OverlapScoreCredit: pointer(0.5)}
				c.OverlapTokens, c.Slowness = 400, 2
			},
			idleTerms,
			Terms{Prefill: 140, Delay: 140 * others(0)},
			[]int{0, 2},
		},
		"a credit above 1": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{OverlapScoreCredit: pointer(3.)}
				c.OverlapTokens = 400
			},
			idleTerms, idleTerms,
			[]int{0, 1, 2},
		},
		"scale": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{PrefillLoadScale: pointer(3.)}
				s.ExpectedAnswer, c.Requests, c.WaitTime, c.Awaiting = 200, 4, 70, 1
			},
			Terms{Prefill: 300, Delay: 300 * others(0)},
			Terms{Wait: 210, Prefill: 300, Delay: 300 * (others(0) + delayQueue), Decode: 4 * decodeWorth * decode},
			[]int{0, 2},
		},
		"no prefill tokens": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{TrackPrefillTokens: pointer(false)}
				c.WaitTime = 70
			},
			idleTerms, idleTerms,
			[]int{0, 1, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 10 {
				s := three()
				tc.change(s, &s.Candidates[1])
				i := NewPredictedLatency().Choose(s)
				if c := s.Candidates[0]; !c.Terms.near(tc.first) || !near(c.Cost, c.Terms.sum(), 1e-9) {
					t.Fatalf("the first has %+v, cost %v; want %+v", c.Terms, c.Cost, tc.first)
				}
				if c := s.Candidates[1]; !c.Terms.near(tc.second) || !near(c.Cost, c.Terms.sum(), 1e-9) {
					t.Fatalf("the second has %+v, cost %v; want %+v", c.Terms, c.Cost, tc.second)
				}
				if !slices.Contains(tc.chosen, i) {
					t.Fatalf("chose %d, want one of %v", i, tc.chosen)
				}
			}
		})
	}
}

func TestHomeHolds(t *testing.T) {
	for name, tc := range map[string]struct {
		home        int
		holds, most int64
		want        bool
	}{
		"no home":                  {-1, 800, 800, false},
		"no target holds anything": {1, 0, 0, false},
		"it holds most":            {1, 800, 800, true},
		"it holds half as much":    {1, 400, 800, true},
		"it holds less":            {1, 384, 800, false},
		"it holds nothing":         {1, 0, 800, false},
		"it alone holds a block":   {1, 16, 0, true},
	} {
		s := three()
		s.Home = tc.home
		s.Candidates[0].OverlapTokens, s.Candidates[1].OverlapTokens, s.Candidates[2].OverlapTokens = 0, tc.holds, tc.most
		if got := s.HomeHolds(); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
