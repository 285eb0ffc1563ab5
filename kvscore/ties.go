package kvscore

import "sync"

// Ties breaks ties uniformly, and evenly: each time, every tied target is
// owed an equal share of the choice, and the one that is owed most gets it,
// by lot among those owed the same. So all have the same chance, as with
// independent draws, but a run of bad luck cannot pile new work on one target.
// The zero value is ready for use, by many goroutines.
type Ties struct {
	mu   sync.Mutex
	owed map[Target]float64
}

// maxOwed bounds what is remembered: far more targets than a pool has, so that
// only targets that are gone are forgotten by it.
const maxOwed = 4096

// sameDebt is the difference below which two targets are owed the same: sums
// of the same fractions differ in their last bits.
const sameDebt = 1e-9

// Pick returns one of tied, which are positions in s.Candidates. Where s.Dry is
// set nobody's debt changes, and those that are owed the same are s.Drawn.
func (t *Ties) Pick(s *Selection, tied []int) int {
	if len(tied) == 1 {
		return tied[0]
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	debts := t.owed
	if debts == nil || len(debts) > maxOwed {
		debts = make(map[Target]float64, len(tied))
	}
	if !s.Dry {
		t.owed = debts
	}
	share := 1 / float64(len(tied))
	best, most, equal := 0, 0.0, 0
	for _, i := range tied {
		owed := debts[s.Candidates[i].Target] + share
		if !s.Dry {
			debts[s.Candidates[i].Target] = owed
		}
		switch {
		case equal == 0 || owed > most+sameDebt:
			best, most, equal = i, owed, 1
		case owed > most-sameDebt:
			equal++
			if s.Rand.IntN(equal) == 0 {
				best = i
			}
		}
	}
	if s.Dry {
		for _, i := range tied {
			if debts[s.Candidates[i].Target]+share > most-sameDebt {
				s.Drawn = append(s.Drawn, i)
			}
		}
		return best
	}
	debts[s.Candidates[best].Target]--
	return best
}
