package kvscore

import (
	"math"
	"sync"
)

// Ties breaks ties uniformly, and evenly: each time, every tied target is
// owed an equal share of the choice, and the one that is owed most gets it,
// by lot among those owed the same. So all have the same chance, as with
// independent draws, but a run of bad luck cannot pile new work on one target.
// The zero value is ready for use, by many goroutines.
type Ties struct {
	mu    sync.Mutex
	debts []debt         // in the order in which the targets were met first
	where map[Target]int // in debts
}

type debt struct {
	target Target
	owed   float64
}

// maxOwed bounds what is remembered: far more targets than a pool has, so that
// only targets that are gone are forgotten by it.
const maxOwed = 4096

// sameDebt is the difference below which two targets are owed the same: sums
// of the same fractions differ in their last bits.
const sameDebt = 1e-9

// Pick returns one of tied, which are positions in s.Candidates; it overwrites
// the list. Where s.Dry is set no debt changes, and those that are owed the same
// are s.Drawn.
func (t *Ties) Pick(s *Selection, tied []int) int {
	switch len(tied) {
	case 0:
		return 0 // no cost equals itself: none is a number
	case 1:
		return tied[0]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.debts) > maxOwed && !s.Dry {
		t.debts, t.where = nil, nil
	}
	share, most, at := 1/float64(len(tied)), math.Inf(-1), -1
	for _, i := range tied {
		owed := share
		if at = t.find(s.Candidates[i].Target, at+1, s.Dry); at >= 0 {
			owed += t.debts[at].owed
		}
		if !s.Dry {
			t.debts[at].owed = owed
		}
		most = max(most, owed)
	}
	if !s.Dry {
		share = 0 // the debts have it now
	}
	equal := tied[:0]
	at = -1
	for _, i := range tied {
		owed := share
		if at = t.find(s.Candidates[i].Target, at+1, s.Dry); at >= 0 {
			owed += t.debts[at].owed
		}
		if owed > most-sameDebt {
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

// cheapest returns a candidate with the lowest cost. Candidates with equal costs share
// evenly.
func (t *Ties) cheapest(s *Selection) int {
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

// find returns where the debt to a target is, a new one if there is none yet; -1
// if there is none and dry is set. It looks at the place that is guessed first:
// lists of candidates have one order, mostly, and long ones would cost a look-up
// for each candidate. The lock is held.
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
