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
		return s.first(tied)
	case s.Dry:
		s.Drawn = append(s.Drawn, tied...)
	}
	return tied[s.Rand.IntN(len(tied))]
}

// first returns the tied position whose target has the session's highest rendezvous rank.
func (s *Selection) first(tied []int) int {
	best, most := tied[0], uint64(0)
	for _, i := range tied {
		if rank := rendezvous(s.Session, s.Candidates[i].Target); rank > most {
			best, most = i, rank
		}
	}
	return best
}

// Cheapest returns the position of a candidate with the lowest Cost. A policy that has set all costs
// ends with it.
func (s *Selection) Cheapest() int {
	best, lowest := s.tied[:0], 0.0
	for i := range s.Candidates {
		switch cost := s.Candidates[i].Cost; {
		case len(best) == 0 || cost < lowest:
			best, lowest = append(best[:0], i), cost
		case cost == lowest:
			best = append(best, i)
		}
	}
	s.tied = best
	return s.Pick(best)
}
