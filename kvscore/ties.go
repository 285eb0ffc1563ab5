package kvscore

import (
	"math"
	"sync"
)

// Ties breaks ties uniformly and evenly. Each choice owes every tied target an equal share.
// The target that is owed most gets the choice; a draw decides among equals. All targets
// have the same chance, as with independent draws, but bad luck cannot pile new work on
// one target. The zero value is ready for use by many goroutines.
//
// A session's ties are different: the tied target with the session's highest rendezvous rank
// gets the choice, so that all routers agree on it. Nobody owes anything for it.
type Ties struct {
	mu    sync.Mutex
	debts []debt         // in the order of the targets' first ties
	where map[Target]int // in debts
}

type debt struct {
	target Target
	owed   float64
}

// maxOwed bounds the debts. It is far above the number of targets of a pool.
const maxOwed = 4096

// sameDebt is the difference below which two targets are owed the same: sums
// of the same fractions differ in their last bits.
const sameDebt = 1e-9

// Pick returns one of tied, which are positions in s.Candidates. It overwrites the list. If
// s.Dry is set, it changes no debt and puts the targets that are owed most in s.Drawn. It
// puts none there for a session, where nothing is left to chance.
func (t *Ties) Pick(s *Selection, tied []int) int {
	switch len(tied) {
	case 0:
		return 0
	case 1:
		return tied[0]
	}
	if s.Session != 0 {
		return s.first(tied)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.debts) > maxOwed && !s.Dry {
		t.debts, t.where = nil, nil
	}
	share, most, equal, at := 1/float64(len(tied)), math.Inf(-1), tied[:0], -1
	for _, i := range tied {
		owed := 0.0 // less the share, which is the same for all
		if at = t.find(s.Candidates[i].Target, at+1, s.Dry); at >= 0 {
			if owed = t.debts[at].owed; !s.Dry {
				t.debts[at].owed += share
			}
		}
		if owed > most+sameDebt {
			equal = equal[:0]
		}
		if most = max(most, owed); owed > most-sameDebt {
			equal = append(equal, i)
		}
	}
	best := equal[0]
	if len(equal) > 1 {
		best = equal[s.Rand.IntN(len(equal))]
	}
	if s.Dry {
		s.Drawn = append(s.Drawn, equal...)
		return best
	}
	t.debts[t.find(s.Candidates[best].Target, best, false)].owed--
	return best
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

// Cheapest returns the position of a candidate with the lowest Cost. Candidates with equal
// costs share evenly. A policy that has set all costs ends with it.
func (t *Ties) Cheapest(s *Selection) int {
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
	return t.Pick(s, best)
}

// find returns the place of the debt to a target. If there is none, it adds one, or returns
// -1 if dry is set. It looks at the guessed place first: lists of candidates mostly have
// one order, so this saves a look-up for each candidate. The lock is held.
func (t *Ties) find(target Target, guess int, dry bool) int {
	if guess < len(t.debts) && t.debts[guess].target == target {
		return guess
	}
	at, known := t.where[target]
	switch {
	case known:
		return at
	case dry:
		return -1
	case t.where == nil:
		t.where = make(map[Target]int)
	}
	t.where[target] = len(t.debts)
	t.debts = append(t.debts, debt{target: target})
	return len(t.debts) - 1
}
