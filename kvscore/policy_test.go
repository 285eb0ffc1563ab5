package kvscore

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// The numbers are computed by hand from Dynamo's formula.
func TestDynamoCost(t *testing.T) {
	two := func() *Selection {
		return &Selection{Findings: Findings{Tokens: 160}, BlockSize: 16, Rand: seeded(1), Candidates: []Candidate{
			{Target: Target{Worker: 1, Rank: 0}, Overlap: Overlap{OverlapBlocks: 4, SharedBlocks: 3}, PrefillTokens: 320, PromptBlocks: 30, UnsharedBlocks: 50, OutputBlocks: 2.4, RequestBlocks: 10, Requests: 2},
			{Target: Target{Worker: 2, Rank: 0}, RequestBlocks: 10},
		}}
	}
	with := func(change func(*Dynamo)) *Dynamo { // Dynamo's own defaults, which count output blocks
		d := NewDynamo()
		d.TrackOutputBlocks = true
		change(d)
		return d
	}
	plain := func() *Dynamo { return with(func(*Dynamo) {}) }
	yes, no, half := true, false, 0.5
	for name, tc := range map[string]struct {
		policy   *Dynamo
		want     [2]float64
		override *Override
	}{
		// (320+160)/16 − 4 + round(32.4) + 7; 160/16 + 10
		"dynamo's defaults": {plain(), [2]float64{26 + 32 + 7, 20}, nil},
		"its router":        {NewDynamo(), [2]float64{26 + 30 + 7, 20}, nil}, // without output blocks
		"for agents": {
			with(func(d *Dynamo) {
				d.OverlapScoreCredit, d.PrefillLoadScale, d.DecodeActiveRequestWeight, d.TrackOutputBlocks = 2, 4, 64, false
			}),
			[2]float64{4*(30-8) + 37 + 2*64, 4*10 + 10},
			nil,
		},
		"prompt blocks":    {with(func(d *Dynamo) { d.TrackOutputBlocks = false }), [2]float64{26 + 30 + 7, 20}, nil},
		"no reuse":         {with(func(d *Dynamo) { d.AssumeKVReuse = false }), [2]float64{26 + 52 + 10, 20}, nil},
		"no active blocks": {with(func(d *Dynamo) { d.TrackActiveBlocks = false }), [2]float64{26, 10}, nil},
		"no prefill":       {with(func(d *Dynamo) { d.TrackPrefillTokens = false }), [2]float64{39, 10}, nil},
		"request weight":   {with(func(d *Dynamo) { d.DecodeActiveRequestWeight = 5 }), [2]float64{65 + 10, 20}, nil},
		// decay 1/(1 + 0.5·(320/16)/10) = 0.5
		"credit decay":        {with(func(d *Dynamo) { d.CreditDecay = 0.5 }), [2]float64{28 + 39, 20}, nil},
		"clamped":             {with(func(d *Dynamo) { d.OverlapScoreCredit = 100 }), [2]float64{39, 20}, nil},
		"an empty override":   {plain(), [2]float64{65, 20}, &Override{}},
		"override credit":     {plain(), [2]float64{28 + 32 + 7, 20}, &Override{OverlapScoreCredit: &half}},
		"override scale":      {plain(), [2]float64{13 + 39, 5 + 10}, &Override{PrefillLoadScale: &half}},
		"override no reuse":   {plain(), [2]float64{26 + 52 + 10, 20}, &Override{AssumeKVReuse: &no}},
		"override reuse":      {with(func(d *Dynamo) { d.AssumeKVReuse = false }), [2]float64{65, 20}, &Override{AssumeKVReuse: &yes}},
		"override no prefill": {plain(), [2]float64{39, 10}, &Override{TrackPrefillTokens: &no}},
	} {
		s := two()
		s.Override = tc.override
		tc.policy.Choose(s)
		if got := [2]float64{s.Candidates[0].Cost, s.Candidates[1].Cost}; got != tc.want {
			t.Errorf("%s: costs %v, want %v", name, got, tc.want)
		}
	}
}

func TestEmptyPrompt(t *testing.T) {
	s := &Selection{BlockSize: 16, Rand: seeded(1), Candidates: make([]Candidate, 2)}
	d := NewDynamo()
	d.CreditDecay = 1
	d.Choose(s)
	if c := s.Candidates[0].Cost; math.IsNaN(c) || c != 0 {
		t.Errorf("cost %v, want 0", c)
	}
}

// counts lets p choose n times among idle candidates.
func counts(p Policy, s *Selection, n int) []int {
	got := make([]int, len(s.Candidates))
	for range n {
		got[p.Choose(s)]++
	}
	return got
}

func TestTiesAreUniform(t *testing.T) {
	for name, p := range map[string]Policy{
		"dynamo": NewDynamo(), "predicted_latency": NewPredictedLatency(), "least_load": &LeastLoad{}, "round_robin": &RoundRobin{},
	} {
		s := &Selection{Findings: Findings{Tokens: 100}, BlockSize: 16, Rand: seeded(1)}
		for i := range 3 {
			s.Candidates = append(s.Candidates, Candidate{Target: Target{Worker: uint64(i), Rank: 0}})
		}
		for i, n := range counts(p, s, 300) {
			if n < 75 || n > 125 {
				t.Errorf("%s: candidate %d was chosen %d times of 300", name, i, n)
			}
		}
	}
}

func TestTemperature(t *testing.T) {
	d := NewDynamo()
	d.Temperature = 1
	s := &Selection{Findings: Findings{Tokens: 1600}, BlockSize: 16, Rand: seeded(1), Candidates: []Candidate{{Overlap: Overlap{OverlapBlocks: 100}}, {}}}
	// the worst has weight 1/e of the best: 0.269
	for range 2 {
		if n := counts(d, s, 10_000)[1]; n < 2500 || n > 2880 {
			t.Errorf("the worse of two was chosen %d times of 10000, want about 2690", n)
		}
		s.Override = &Override{Temperature: &d.Temperature}
		d = NewDynamo()
	}
}

func TestLeastLoadOrder(t *testing.T) {
	s := &Selection{Rand: seeded(1), BlockSize: 16, Candidates: []Candidate{
		{Requests: 2}, {Requests: 1, PrefillTokens: 10}, {Requests: 1, PrefillTokens: 9, OutputBlocks: 1}, {Requests: 1, PrefillTokens: 9},
	}}
	if i := (&LeastLoad{}).Choose(s); i != 3 {
		t.Errorf("chose %d, want 3", i)
	}
}

// TestFactorsSteer has idle targets of which a factor makes one cheaper: it gets
// all that comes.
func TestFactorsSteer(t *testing.T) {
	for _, p := range []Policy{NewDynamo(), NewPredictedLatency()} {
		s := NewScheduler(Settings{})
		r := prompt(upTo(4)...)
		r.Factors = []float64{1, 0.5, 0}
		sel := Selection{Rand: seeded(1)}
		for range 20 {
			i, lease := s.selectOf(epoch, r, targets(3), -1, p, &sel)
			lease.End(false, nil)
			if i != 1 {
				t.Fatalf("%T: chose %d, costs %+v", p, i, sel.Candidates)
			}
		}
		a, b, c := sel.Candidates[0].Cost, sel.Candidates[1].Cost, sel.Candidates[2].Cost
		if a == 0 || !near(b, a/2, 1e-9) || c != a {
			t.Errorf("%T: costs %v, %v, %v", p, a, b, c)
		}
	}
}

// TestOutputFadesTowardsItsEnd has an answer whose length is expected: its
// blocks count less and less, and the loads come back to zero.
func TestOutputFadesTowardsItsEnd(t *testing.T) {
	s := NewScheduler(Settings{})
	ts := targets(1)
	t0 := time.Now()
	r := prompt(upTo(2)...)
	r.Tokens, r.Streamed, r.ExpectedTokens = 32, true, 320
	sel, look := Selection{Rand: seeded(1)}, Selection{Rand: seeded(1)}
	_, lease := s.selectOf(t0, r, ts, -1, new(LeastLoad), &sel)
	output := func() float64 {
		s.explainOf(t0, prompt(9), ts, -1, new(LeastLoad), &look)
		return look.Candidates[0].OutputBlocks
	}
	for _, v := range []struct {
		tokens int64
		want   float64
	}{{16, 0.95}, {160, 5}, {304, 19 * 0.05}, {320, 0}, {640, 0}} {
		lease.Output(t0, v.tokens)
		if got := output(); math.Abs(got-v.want) > 1e-9 {
			t.Errorf("after %d tokens: %v blocks, want %v", v.tokens, got, v.want)
		}
	}
	if l, _ := s.Load(t0, ts[0]); l.OutputBlocks != 40 {
		t.Errorf("the load shows %d blocks, want 40", l.OutputBlocks)
	}
	lease.End(true, nil)
	if got := output(); got != 0 {
		t.Errorf("%v blocks are left", got)
	}
}

// first returns the target that a new scheduler chooses for a session among idle targets.
func first(t *testing.T, p Policy, session uint64, ts []Target) Target {
	t.Helper()
	s := NewScheduler(Settings{})
	r := prompt(upTo(10)...)
	r.Session = session
	sel := &Selection{Rand: seeded(session)}
	dry := s.explainOf(epoch, r, ts, -1, p, sel)
	i, l := s.selectOf(epoch, r, ts, -1, p, sel)
	l.End(true, nil)
	if session != 0 && len(ts) > 1 && (dry.Chosen != i || dry.Drawn != nil) {
		t.Errorf("session %d goes to %d, explained as %d, by chance among %v", session, i, dry.Chosen, dry.Drawn)
	}
	return ts[i]
}

func tiePolicies() map[string]Policy {
	return map[string]Policy{"predicted_latency": NewPredictedLatency(), "dynamo": NewDynamo(), "least_load": &LeastLoad{}}
}

// TestRoutersAgreeOnANewSession has two routers with the same targets in another order. One
// of them has served other sessions and requests before.
func TestRoutersAgreeOnANewSession(t *testing.T) {
	here := targets(5)
	for i := range here {
		here[i].Rank = uint32(i % 2) //nolint:gosec // small
	}
	there := slices.Clone(here)
	slices.Reverse(there)
	theirs := tiePolicies()
	for name, p := range tiePolicies() {
		for session := range uint64(200) {
			first(t, theirs[name], 0, there) // without a session: by the fair share
			session = cache.Mix(session)
			if a, b := first(t, p, session, here), first(t, theirs[name], session, there); a != b {
				t.Fatalf("%s: session %x goes to %s here and to %s there", name, session, a, b)
			}
		}
	}
}

// TestLoadOutweighsRendezvous books many requests of one session at once. They spread, for
// only the first finds equal targets.
func TestLoadOutweighsRendezvous(t *testing.T) {
	for name, p := range tiePolicies() {
		s, ts := declared(4)
		sel := &Selection{Rand: seeded(1)}
		got := make([]int, len(ts))
		for i := range 40 {
			r := prompt(uint64(2*i+1), uint64(2*i+2))
			r.Session = 17
			at, _ := s.selectOf(epoch.Add(time.Duration(i)*time.Microsecond), r, ts, -1, p, sel)
			got[at]++
		}
		if slices.Max(got) > 12 {
			t.Errorf("%s: %v", name, got)
		}
	}
}
