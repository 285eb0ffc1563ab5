package observe

import (
	"sync"
	"time"
)

// Outcomes count what became of the requests of each class in the last minutes.
type Outcomes struct {
	mu    sync.Mutex
	slots [RecentSlots]outcomes // a ring by number
}

type outcomes struct {
	slot   int64
	counts map[[2]string]int64 // by class and outcome
}

// Count counts a request. Classes and outcomes are few.
func (o *Outcomes) Count(t time.Time, class, outcome string) {
	n := SlotOf(t)
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &o.slots[n%RecentSlots]
	if s.slot != n {
		*s = outcomes{n, make(map[[2]string]int64)}
	}
	s.counts[[2]string{class, outcome}]++
}

// Recent returns the counts by class and outcome.
func (o *Outcomes) Recent(now time.Time) map[string]map[string]int64 {
	sums := make(map[string]map[string]int64)
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.slots {
		if o.slots[i].slot <= SlotOf(now)-RecentSlots {
			continue
		}
		for key, n := range o.slots[i].counts {
			if sums[key[0]] == nil {
				sums[key[0]] = make(map[string]int64)
			}
			sums[key[0]][key[1]] += n
		}
	}
	return sums
}
