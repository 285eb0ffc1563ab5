package kvscore

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// explained are the policies that the tests explain choices of.
func explained() map[string]func() Policy {
	return map[string]func() Policy{
		"random":            func() Policy { return Random{} },
		"power_of_2":        func() Policy { return PowerOfTwo{} },
		"prefix_hash":       func() Policy { return new(PrefixHash) },
		"dynamo":            func() Policy { return NewDynamo() },
		"predicted_latency": func() Policy { return NewPredictedLatency() },
		"temperature":       func() Policy { d := NewDynamo(); d.Temperature = 0.5; return d },
		"round_robin":       func() Policy { return new(RoundRobin) },
		"least_load":        func() Policy { return new(LeastLoad) },
	}
}

// TestExplainAgreesWithSelect explains each of 1,000 random choices in virtual time, several
// times, before it is made with the same source of randomness. What is explained must come, with
// the same terms. Choices and terms must be those of a scheduler that never explains anything.
func TestExplainAgreesWithSelect(t *testing.T) {
	for name, policy := range explained() {
		t.Run(name, func(t *testing.T) {
			asked, ts := declared(5)
			quiet, _ := declared(5)
			at := epoch
			p, q := policy(), policy()
			rnd := rand.New(rand.NewPCG(1, 2))
			var live [][2]*Lease
			drawn := 0
			for i := range uint64(1000) {
				r := prompt(upTo(rnd.Uint64N(80))...)
				r.Root, r.Streamed = rnd.Uint64N(8), rnd.IntN(4) > 0
				if i%2 == 0 {
					r.BoundTarget = ts[rnd.IntN(5)]
				}
				at = at.Add(time.Duration(rnd.IntN(2000)) * time.Millisecond)
				bound := -1
				if rnd.IntN(4) == 0 {
					bound = rnd.IntN(len(ts))
				}
				var sel Selection
				var e Explanation
				for range 3 {
					sel.Rand = seeded(i)
					e = asked.explainOf(at, r, ts, bound, p, &sel)
				}
				terms := append([]Candidate(nil), sel.Candidates...)
				drawn += min(1, len(e.Drawn))
				sel.Rand = seeded(i)
				got, l := asked.selectOf(at, r, ts, bound, p, &sel)
				if got != e.Chosen || bound < 0 && got != e.Preferred || bound >= 0 && got != bound || e.Fault {
					t.Fatalf("choice %d: explained %+v with bound %d, chose %d", i, e, bound, got)
				}
				for j := range terms {
					if bound >= 0 {
						terms[j].Cost, terms[j].Terms = 0, Terms{} // the policy did not run
					}
					if terms[j] != sel.Candidates[j] {
						t.Fatalf("choice %d: explained the terms %+v, they are %+v", i, terms[j], sel.Candidates[j])
					}
				}
				other := Selection{Rand: seeded(i)}
				want, l2 := quiet.selectOf(at, r, ts, bound, q, &other)
				if got != want || !slices.Equal(sel.Candidates, other.Candidates) {
					t.Fatalf("choice %d: %d after it was explained, %d otherwise", i, got, want)
				}
				if live = append(live, [2]*Lease{l, l2}); len(live) > 12 {
					k := rnd.IntN(len(live))
					for _, l := range live[k] {
						l.FirstToken(at)
						l.End(true, nil)
					}
					live[k] = live[len(live)-1]
					live = live[:len(live)-1]
				}
			}
			if drawn == 0 && name != "round_robin" && name != "prefix_hash" {
				t.Error("chance never decided")
			}
		})
	}
}

// TestExplainNamesTies has targets tied: explaining names those that chance decides among.
func TestExplainNamesTies(t *testing.T) {
	s, ts := declared(4)
	p := &LeastLoad{}
	sel := &Selection{Rand: seeded(1)}
	if e := s.explainOf(epoch, prompt(), ts, -1, p, sel); len(e.Drawn) != 4 {
		t.Errorf("drawn from %v, want all four", e.Drawn)
	}
	at, l := s.selectOf(epoch, prompt(1, 2), ts, -1, p, sel)
	if e := s.explainOf(epoch, prompt(), ts, -1, p, sel); len(e.Drawn) != 3 || slices.Contains(e.Drawn, at) {
		t.Errorf("drawn from %v, want the three without a request", e.Drawn)
	}
	l.End(true, nil)
	if e := s.explainOf(epoch, prompt(), ts[:1], -1, p, sel); e.Chosen != 0 || e.Drawn != nil {
		t.Errorf("one candidate: %+v", e)
	}
	idle(t, s, ts, epoch)
}
