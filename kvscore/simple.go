package kvscore

import "sync/atomic"

// RoundRobin takes the candidates in turn, whatever they hold.
type RoundRobin struct {
	turn atomic.Uint64
}

// Choose implements Policy.
func (r *RoundRobin) Choose(s *Selection) int {
	return int((r.turn.Add(1) - 1) % uint64(len(s.Candidates)))
}

// LeastLoad takes the candidate with the fewest active requests; among these
// the one with the fewest prefill tokens booked, then the fewest active
// blocks. Equal ones share evenly.
type LeastLoad struct {
	ties Ties
}

// Choose implements Policy.
func (l *LeastLoad) Choose(s *Selection) int {
	for i := range s.Candidates {
		s.Candidates[i].Cost = float64(s.Candidates[i].Requests)
	}
	return fewest(s, &l.ties, lessLoaded)
}

func lessLoaded(a, b *Candidate) bool {
	if a.Requests != b.Requests {
		return a.Requests < b.Requests
	}
	if a.PrefillTokens != b.PrefillTokens {
		return a.PrefillTokens < b.PrefillTokens
	}
	return a.PromptBlocks+a.OutputBlocks < b.PromptBlocks+b.OutputBlocks
}
