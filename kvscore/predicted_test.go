package kvscore

import (
	"math"
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

// three returns a selection among three candidates that are alike, for a prompt of
// 1,000 tokens, with nobody waiting.
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
		"decode behind many that wait": {
			func(s *Selection, c *Candidate) { s.ExpectedAnswer = 200; s.Awaiting = 3000; c.Requests = 4 },
			with(func(t *Terms) { t.Delay = 100 * (others(1000)) }),
			with(func(t *Terms) { t.Delay = 100 * (others(1000)); t.Decode = 4 * maxDecode * decode }),
			[]int{0, 2},
		},
		"decode of an answer of unknown length": {
			func(_ *Selection, c *Candidate) { c.Requests = 4 },
			idleTerms, idleTerms,
			[]int{0, 1, 2},
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
		"turns of what somebody holds three quarters of": {
			func(s *Selection, c *Candidate) {
				s.ExpectedTurns, s.TurnTime = 3, 40
				s.Candidates[2].OverlapTokens = 750
				c.RecentWork = 120
			},
			idleTerms, with(func(t *Terms) { t.Turns = turnsWorth * 3 * 40 * 120 / 40 / 4 }),
			[]int{0, 2},
		},
		"turns of which there are none": {
			func(s *Selection, c *Candidate) { s.TurnTime = 40; c.RecentWork = 120 },
			idleTerms, idleTerms,
			[]int{0, 1, 2},
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
		"prefill tokens": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{TrackPrefillTokens: pointer(true)}
				c.WaitTime = 70
			},
			idleTerms, with(func(t *Terms) { t.Wait = 70 }),
			[]int{0, 2},
		},
		"reuse, which is always counted": {
			func(s *Selection, c *Candidate) {
				s.Override = &Override{AssumeKVReuse: pointer(false)}
				c.WaitTime = 70
			},
			idleTerms, with(func(t *Terms) { t.Wait = 70 }),
			[]int{0, 2},
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

// TestTermsAreLeftOut has a candidate with each term above 0, and leaves one out.
func TestTermsAreLeftOut(t *testing.T) {
	full := func() *Selection {
		s := three()
		s.Home, s.ExpectedAnswer, s.ExpectedTurns, s.TurnTime, s.Awaiting = 0, 200, 3, 40, 3
		s.Candidates[0].OverlapTokens = 500
		c := &s.Candidates[1]
		c.WaitTime, c.Awaiting, c.Requests, c.RecentWork = 70, 2, 4, 120
		return s
	}
	s := full()
	NewPredictedLatency().Choose(s)
	whole := s.Candidates[1].Terms
	if whole.Wait*whole.Prefill*whole.Delay*whole.Decode*whole.Turns*whole.Leave == 0 {
		t.Fatalf("a term is 0: %+v", whole)
	}
	for name, tc := range map[string]struct {
		out    Term
		change func(*Terms)
	}{
		"none":   {0, func(*Terms) {}},
		"wait":   {TermWait, func(t *Terms) { t.Wait = 0 }},
		"delay":  {TermDelay, func(t *Terms) { t.Delay = 0 }},
		"queue":  {TermQueue, func(t *Terms) { t.Delay -= 2 * delayQueue * 100 }},
		"decode": {TermDecode, func(t *Terms) { t.Decode = 0 }},
		"turns":  {TermTurns, func(t *Terms) { t.Turns = 0 }},
		"leave":  {TermLeave, func(t *Terms) { t.Leave = 0 }},
		"two":    {TermWait | TermLeave, func(t *Terms) { t.Wait, t.Leave = 0, 0 }},
	} {
		want := whole
		tc.change(&want)
		s := full()
		NewPredictedLatency().Without(tc.out).Choose(s)
		if got := s.Candidates[1].Terms; !got.near(want) {
			t.Errorf("without %s: %+v, want %+v", name, got, want)
		}
	}
}

func TestFactorOfPredictedLatency(t *testing.T) {
	s := three()
	s.Candidates[0].Factor, s.Candidates[1].Factor, s.Candidates[2].Factor = 1.5, 0.9, 0
	p := NewPredictedLatency()
	for i, n := range counts(p, s, 10) {
		if want := []int{0, 10, 0}[i]; n != want {
			t.Errorf("candidate %d was chosen %d times of 10", i, n)
		}
		if c := s.Candidates[i]; !near(c.Cost, idleTerms.sum()*[]float64{1.5, 0.9, 1}[i], 1e-9) || c.Terms != idleTerms {
			t.Errorf("candidate %d: cost %v of %+v", i, c.Cost, c.Terms)
		}
	}
}

func TestTemperatureOfPredictedLatency(t *testing.T) {
	s := three()
	s.Candidates = s.Candidates[:2]
	s.Candidates[1].WaitTime = 50
	p := NewPredictedLatency()
	s.Override = &Override{Temperature: pointer(1.)}
	// the worst has weight 1/e of the best: 0.269
	if n := counts(p, s, 10_000)[1]; n < 2500 || n > 2880 {
		t.Errorf("the worse of two was chosen %d times of 10000, want about 2690", n)
	}
	s.Override = &Override{Temperature: pointer(0.)}
	if n := counts(p, s, 100)[1]; n != 0 {
		t.Errorf("the worse of two was chosen %d times without a temperature", n)
	}
}

func TestHomeHolds(t *testing.T) {
	for name, tc := range map[string]struct {
		home      int
		known     float64
		homeHolds int64
		want      bool
	}{
		"no home":                    {-1, 800, 800, false},
		"nobody holds anything":      {1, 0, 0, false},
		"it holds all":               {1, 800, 800, true},
		"it holds half":              {1, 800, 400, true},
		"it holds half but a block":  {1, 800, 392, true},
		"it holds less":              {1, 800, 384, false},
		"it holds nothing":           {1, 800, 0, false},
		"another holds next to none": {1, 16, 0, true},
	} {
		s := three()
		s.Home, s.Known.Tokens = tc.home, tc.known
		s.Candidates[1].OverlapTokens = tc.homeHolds
		if got := s.HomeHolds(); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
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

// TestLongHistoryWithNewTails sends requests with one history of 96,000 tokens, one
// after the other, to idle targets.
func TestLongHistoryWithNewTails(t *testing.T) {
	s, ts := declared(4)
	p, history, at := NewPredictedLatency(), upTo(6000), epoch
	sel := &Selection{Rand: seeded(1)}
	for i := range uint64(6) {
		r := prompt(slices.Concat(history, distinct(i, 8))...)
		chosen, l := s.Select(at, r, ts, -1, p, sel)
		best := int64(0)
		for _, c := range sel.Candidates {
			best = max(best, c.OverlapTokens)
		}
		if more := best - sel.Candidates[chosen].OverlapTokens; more > 128 || i > 0 && best < 95_000 {
			t.Errorf("request %d computes %d tokens more than the best holder of %d would", i, more, best)
		}
		serve(l, &at, r.Tokens-sel.Candidates[chosen].OverlapTokens)
	}
	idle(t, s, ts, at)
}

// TestOnePromptManyTimes sends the same prompt again and again.
func TestOnePromptManyTimes(t *testing.T) {
	for _, blocks := range []uint64{20, 200, 6000} {
		s, ts := declared(4)
		p, computed, at, sel := NewPredictedLatency(), int64(0), epoch, &Selection{Rand: seeded(1)}
		for range 16 {
			r := prompt(upTo(blocks)...)
			chosen, l := s.Select(at, r, ts, -1, p, sel)
			n := r.Tokens - sel.Candidates[chosen].OverlapTokens
			if n > 16 {
				computed += n
			}
			serve(l, &at, n)
		}
		if want := int64(blocks) * 16; computed != want {
			t.Errorf("%d tokens are computed of a prompt of %d", computed, want)
		}
		idle(t, s, ts, at)
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

// TestConversationsWithOneStem has conversations that begin with the same stem come at
// once: they do not all pile up where the first one was, and their next turns stay.
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

// TestNoCostIsNaN has selections with the ends of what is possible.
func TestNoCostIsNaN(t *testing.T) {
	for name, change := range map[string]func(s *Selection){
		"nothing":       func(s *Selection) { *s = Selection{Home: -1, Rand: s.Rand, Candidates: make([]Candidate, 3)} },
		"one candidate": func(s *Selection) { s.Candidates = s.Candidates[:1] },
		"an empty home": func(s *Selection) { s.Home = 0; s.Tokens = 0 },
		"no scale": func(s *Selection) {
			s.Override = &Override{PrefillLoadScale: pointer(0.), OverlapScoreCredit: pointer(0.)}
		},
		"turns, no work": func(s *Selection) { s.ExpectedTurns, s.TurnTime = maxTurns, 1e6 },
		"huge": func(s *Selection) {
			s.Tokens, s.ExpectedAnswer, s.ExpectedTurns, s.TurnTime, s.Awaiting, s.Home = math.MaxInt64, 1e9, maxTurns, 1e12, 1e6, 1
			for i := range s.Candidates {
				c := &s.Candidates[i]
				c.WaitTime, c.PrefillTime, c.Requests, c.OverlapTokens, c.RecentWork = 1e12, 1e15, 1e6, math.MaxInt64, float64(i)*1e12
			}
		},
		"hot":           func(s *Selection) { s.Override = &Override{Temperature: pointer(1e9)} },
		"nearly frozen": func(s *Selection) { s.Override = &Override{Temperature: pointer(1e-300)} },
	} {
		s := three()
		change(s)
		if i := NewPredictedLatency().Choose(s); i < 0 || i >= len(s.Candidates) {
			t.Errorf("%s: chose %d", name, i)
		}
		for _, c := range s.Candidates {
			if math.IsNaN(c.Cost) || math.IsInf(c.Cost, 0) || c.Cost < 0 {
				t.Errorf("%s: cost %v of %+v", name, c.Cost, c.Terms)
			}
		}
	}
}
