package sim

import (
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/rules"
)

// ablation is predicted_latency without a part of its cost.
type ablation struct {
	of      *kvscore.PredictedLatency
	without func(*kvscore.Candidate)
	ties    kvscore.Ties
}

// ablated returns predicted_latency without the part that a function takes out of the terms.
func ablated(without func(*kvscore.Candidate)) func(*rules.View) kvscore.Policy {
	return func(*rules.View) kvscore.Policy {
		return &ablation{of: kvscore.NewPredictedLatency(), without: without}
	}
}

// Choose implements kvscore.Policy.
func (a *ablation) Choose(s *kvscore.Selection) int {
	rnd := s.Rand
	s.Rand = noDraw{}
	a.of.Choose(s) // for the terms alone
	s.Rand = rnd
	var best []int
	for i := range s.Candidates {
		c := &s.Candidates[i]
		a.without(c)
		t := &c.Terms
		c.Cost = t.Wait + t.Prefill + t.Delay + t.Decode + t.Turns + t.Leave
		if c.Factor != 0 {
			c.Cost *= c.Factor
		}
		switch {
		case len(best) == 0 || c.Cost < s.Candidates[best[0]].Cost:
			best = append(best[:0], i)
		case c.Cost == s.Candidates[best[0]].Cost:
			best = append(best, i)
		}
	}
	return a.ties.Pick(s, best)
}

// noDraw leaves the replay's random numbers to the choice that counts.
type noDraw struct{}

func (noDraw) IntN(int) int     { return 0 }
func (noDraw) Float64() float64 { return 0 }

// queueDelay is delayQueue of kvscore/predicted.go: the weight of requests on the same target
// in the delay.
const queueDelay = 0.5

// The parts of the cost that an ablation takes out.
func noWait(c *kvscore.Candidate)   { c.Terms.Wait = 0 }
func noDelay(c *kvscore.Candidate)  { c.Terms.Delay = 0 }
func noQueue(c *kvscore.Candidate)  { c.Terms.Delay -= queueDelay * float64(c.Awaiting) * c.PrefillTime }
func noDecode(c *kvscore.Candidate) { c.Terms.Decode = 0 }
func noTurns(c *kvscore.Candidate)  { c.Terms.Turns = 0 }
func noLeave(c *kvscore.Candidate)  { c.Terms.Leave = 0 }
