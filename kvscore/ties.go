package kvscore

// Pick returns one of tied, which are positions in s.Candidates, by a draw. A session's ties are different:
// the tied target with the session's highest rendezvous rank gets the choice, so that all routers agree on
// it. If s.Dry is set, Pick puts what a draw decides among in s.Drawn.
func (s *Selection) Pick(tied []int) int {
	switch {
	case len(tied) == 0:
		return 0
	case len(tied) == 1:
		return tied[0]
	case s.Session != 0:
		return s.first(s.Session, tied)
	case s.Dry:
		s.Drawn = append(s.Drawn, tied...)
	}
	return tied[s.Rand.IntN(len(tied))]
}

// first returns the position among some whose target has the highest rendezvous rank for a hash.
func (s *Selection) first(hash uint64, among []int) int {
	best, most := among[0], uint64(0)
	for _, i := range among {
		if rank := rendezvous(hash, s.Candidates[i].Target); rank > most {
			best, most = i, rank
		}
	}
	return best
}

// Cheapest returns the position of a candidate with the lowest Cost. A policy that has set all costs
// ends with it.
func (s *Selection) Cheapest() int {
	return s.least(func(a, b *Candidate) bool { return a.Cost < b.Cost })
}

// least returns the position of a candidate that is not more than any other.
func (s *Selection) least(less func(a, b *Candidate) bool) int {
	best := s.tied[:0]
	for i := range s.Candidates {
		switch c := &s.Candidates[i]; {
		case len(best) == 0 || less(c, &s.Candidates[best[0]]):
			best = append(best[:0], i)
		case !less(&s.Candidates[best[0]], c):
			best = append(best, i)
		}
	}
	s.tied = best
	return s.Pick(best)
}
