package kvscore

import (
	"math"
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
// at the terms of the first candidate and of the second. The numbers are computed from
// what Terms and the constants say, all in milliseconds.
func TestTerms(t *testing.T) {
	// an answer of 200 tokens behind 1,000
	const decode = 200 * (0.1 + 1e-4*(1000+100))
	// what a home with 800 tokens of the prompt would have to compute
	const held = 800*0.1 + 1e-6*800*400
	for name, tc := range map[string]struct {
		change func(s *Selection, c *Candidate)
		want   func(first, second *Terms) // nil: as idle ones
	}{
		"nothing": {func(*Selection, *Candidate) {}, nil},
		"wait": {
			func(_ *Selection, c *Candidate) { c.WaitTime = 70 },
			func(_, second *Terms) { second.Wait = 70 },
		},
		"prefill": {
			func(_ *Selection, c *Candidate) { c.PrefillTime = 60 },
			func(_, second *Terms) { second.Prefill, second.Delay = 60, 60*others(0) },
		},
		"delay by requests that wait anywhere": {
			func(s *Selection, _ *Candidate) { s.Awaiting = 6 },
			func(first, second *Terms) { first.Delay, second.Delay = 100*others(2), 100*others(2) },
		},
		"delay by requests that wait there": {
			func(_ *Selection, c *Candidate) { c.Awaiting = 3 },
			func(_, second *Terms) { second.Delay = 100 * (others(0) + 3*delayQueue) },
		},
		"decode": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer, c.Requests, c.Slowness = 200, 4, 2 },
			func(_, second *Terms) { second.Decode = 4 * 2 * decodeWorth * decode },
		},
		"decode beside prefills of three times its work": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer, s.MeanPrefill, c.Requests = 200, 3*decode, 4 },
			func(_, second *Terms) { second.Decode = 4 * decodeWorth / 4 * decode },
		},
		"decode behind some that wait, with a half full memory": {
			func(s *Selection, c *Candidate) {
				s.ExpectedAnswer, s.Awaiting, c.Requests, c.MemoryUse = 200, 6, 4, (1+nearlyFull)/2
			},
			func(first, second *Terms) {
				first.Delay, second.Delay = 100*others(2), 100*others(2)
				second.Decode = 4 * (decodeWorth + decodeLoad*2/2) * decode
			},
		},
		"decode behind many that wait, with full memory elsewhere": {
			func(s *Selection, c *Candidate) {
				s.ExpectedAnswer, s.Awaiting, c.Requests, s.Candidates[0].MemoryUse = 200, 3000, 4, 1.2
			},
			func(first, second *Terms) {
				first.Delay, second.Delay = 100*others(1000), 100*others(1000)
				second.Decode = 4 * maxDecode * decode
			},
		},
		"turns": { // the others have 30, so 60 on average
			func(s *Selection, c *Candidate) {
				s.ExpectedTurns, s.TurnTime = 3, 40
				s.Candidates[0].RecentWork, s.Candidates[2].RecentWork, c.RecentWork = 30, 30, 120
			},
			func(_, second *Terms) { second.Turns = turnsWorth * 3 * 40 * (120 - 30) / 60 },
		},
		"turns of what some target holds three quarters of": {
			func(s *Selection, c *Candidate) {
				s.ExpectedTurns, s.TurnTime, s.Candidates[2].OverlapTokens, c.RecentWork = 3, 40, 750, 120
			},
			func(_, second *Terms) { second.Turns = turnsWorth * 3 * 40 * 120 / 40 / 4 },
		},
		"turns of a prompt of which nothing is known": {
			func(s *Selection, c *Candidate) { s.Tokens, s.ExpectedTurns, s.TurnTime, c.RecentWork = 0, 3, 40, 120 },
			nil,
		},
		"a home that is far busier": {
			func(s *Selection, c *Candidate) { s.Home, c.OverlapTokens, c.WaitTime = 1, 800, 1000 },
			func(first, second *Terms) { first.Leave, second.Wait = leavePrice*held, 1000 },
		},
		"a home that holds nothing": {func(s *Selection, _ *Candidate) { s.Home = 1 }, nil},
		"a high priority": {
			func(s *Selection, c *Candidate) { s.Priority, c.WaitTime = 5, 70 },
			func(first, second *Terms) {
				first.Prefill, second.Wait, second.Prefill = urgent*100, urgent*70, urgent*100
			},
		},
		"a low priority": {
			func(s *Selection, c *Candidate) { s.Priority, c.WaitTime = -5, 70 },
			func(first, second *Terms) {
				first.Prefill, second.Wait, second.Prefill = 100/urgent, 70/urgent, 100/urgent
			},
		},
		// half of the 400 cached tokens are computed again, on a target twice as slow
		"credit": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{OverlapScoreCredit: pointer(0.5)}
				c.OverlapTokens, c.Slowness = 400, 2
			},
			func(_, second *Terms) { second.Prefill, second.Delay = 140, 140*others(0) },
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
				*first = Terms{Prefill: 300, Delay: 300 * others(0)}
				*second = Terms{Wait: 210, Prefill: 300, Delay: 300 * (others(0) + delayQueue), Decode: 4 * decodeWorth * decode}
			},
		},
		"no prefill tokens": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{TrackPrefillTokens: pointer(false)}
				c.WaitTime = 70
			},
			nil,
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
