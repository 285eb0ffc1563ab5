package kvscore

import (
	"cmp"
	"sync/atomic"
)

// RoundRobin takes the candidates in turn.
type RoundRobin struct {
	turn atomic.Uint64
}

// Choose implements Policy.
func (r *RoundRobin) Choose(s *Selection) int {
	if s.Dry {
		return int(r.turn.Load() % uint64(len(s.Candidates)))
	}
	return int((r.turn.Add(1) - 1) % uint64(len(s.Candidates)))
}

// LeastLoad takes the candidate with the fewest active requests, then the fewest booked
// prefill tokens, then the fewest active blocks. A draw decides between equal ones.
type LeastLoad struct{}

// Choose implements Policy.
func (*LeastLoad) Choose(s *Selection) int {
	for i := range s.Candidates {
		s.Candidates[i].Cost = float64(s.Candidates[i].Requests)
	}
	return s.least(lessLoaded)
}

func lessLoaded(a, b *Candidate) bool {
	order := cmp.Or(cmp.Compare(a.Requests, b.Requests), cmp.Compare(a.PrefillTokens, b.PrefillTokens))
	return cmp.Or(order, cmp.Compare(a.PromptBlocks+a.OutputBlocks, b.PromptBlocks+b.OutputBlocks)) < 0
}

// Random takes any candidate, each with the same probability.
type Random struct{}

// Choose implements Policy.
func (Random) Choose(s *Selection) int {
	s.drawAny()
	return s.Rand.IntN(len(s.Candidates))
}

// PowerOfTwo draws two different candidates and takes the less loaded one: fewer active
// requests, then fewer booked prefill tokens, then fewer active blocks. It sets the cost
// of only these two, to their requests.
type PowerOfTwo struct{}

// Choose implements Policy.
func (PowerOfTwo) Choose(s *Selection) int {
	n := len(s.Candidates)
	if n == 1 {
		return 0
	}
	s.drawAny()
	i, j := s.Rand.IntN(n), s.Rand.IntN(n-1)
	if j >= i {
		j++ // skips the first drawn
	}
	a, b := &s.Candidates[i], &s.Candidates[j]
	a.Cost, b.Cost = float64(a.Requests), float64(b.Requests)
	if lessLoaded(b, a) {
		return j
	}
	return i // if both are equally loaded, the order of the draw is fair
}
