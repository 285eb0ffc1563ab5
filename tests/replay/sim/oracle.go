package sim

import (
	"cmp"
	"slices"
	"time"
)

// oracleList bounds the requests of which the oracle may still drop one.
const oracleList = 300

// Oracle returns the largest share of requests with a first token within a target, if all arrivals were
// known. The pool is one engine as fast as all. Requests take as much of its time as they did in an
// overload without refusals, which the outcomes are of.
//
// Whenever a request would be late, it drops the one that delays the others most. With one target for
// all, that is the optimum (Kise, Ibaraki, Mine: Operations Research 26, 1978).
func Oracle(outcomes []Outcome, target time.Duration) float64 {
	list := slices.Clone(outcomes)
	slices.SortFunc(list, func(a, b Outcome) int { return cmp.Compare(a.Arrived, b.Arrived) })
	work, end := 0.0, time.Duration(0)
	for _, x := range list {
		work, end = work+x.Work, max(end, x.First)
	}
	unit := float64(end-list[0].Arrived) / work // of the pool's time for a millisecond of work
	var kept []Outcome
	from, served := 0.0, 0
	after := func(t float64, x Outcome) float64 { return max(t, float64(x.Arrived)) + x.Work*unit }
	ends := func(without int) float64 {
		t := from
		for i, x := range kept {
			if i != without {
				t = after(t, x)
			}
		}
		return t
	}
	for _, x := range list {
		if kept = append(kept, x); ends(-1) > float64(x.Arrived+target) {
			worst, least := 0, ends(0)
			for i := 1; i < len(kept); i++ {
				if t := ends(i); t < least {
					worst, least = i, t
				}
			}
			kept = slices.Delete(kept, worst, worst+1)
		}
		if len(kept) > oracleList {
			from, kept, served = after(from, kept[0]), kept[1:], served+1
		}
	}
	return float64(served+len(kept)) / float64(len(list))
}
