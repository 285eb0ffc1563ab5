package kvscore

import "sync/atomic"

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
type LeastLoad struct {
	ties Ties
}

// Choose implements Policy.
func (l *LeastLoad) Choose(s *Selection) int {
	best := s.tied[:0]
	for i := range s.Candidates {
		c := &s.Candidates[i]
		c.Cost = float64(c.Requests)
		switch {
		case len(best) == 0 || lessLoaded(c, &s.Candidates[best[0]]):
			best = append(best[:0], i)
		case !lessLoaded(&s.Candidates[best[0]], c):
			best = append(best, i)
		}
	}
	s.tied = best
	return l.ties.Pick(s, best)
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
