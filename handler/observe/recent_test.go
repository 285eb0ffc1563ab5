package observe

import (
	"testing"
	"time"
)

// TestRecentEnds checks quantiles, and that old slots do not count.
func TestRecentEnds(t *testing.T) {
	var r Recent
	now := time.Unix(1_700_000_005, 0)
	for i := range 100 {
		r.firstToken(now, time.Duration(i+1)*10*time.Millisecond)
	}
	r.attempt(now.Add(SlotTime), true, true)
	r.attempt(now.Add(SlotTime), true, true)
	var sum Sums
	line := []Sums{{Slot: SlotOf(now)}, {Slot: SlotOf(now) + 1}}
	r.Add(now.Add(SlotTime), &sum, line)
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Millisecond, 0.99: 990 * time.Millisecond} {
		if got := sum.FirstTokens.Quantile(q); got < want*80/100 || got > want*120/100 {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	if sum.Failed != 2 || line[0].FirstTokens.N != 100 || line[1].Failed != 2 || line[1].FirstTokens.N != 0 {
		t.Errorf("sums %d, line %d %d", sum.Failed, line[0].FirstTokens, line[1].Failed)
	}
	sum = Sums{}
	r.Add(now.Add(RecentSlots*SlotTime), &sum, nil)
	if sum.FirstTokens.N != 0 || sum.Failed != 2 {
		t.Errorf("after five minutes, %d and %d are left", sum.FirstTokens.N, sum.Failed)
	}
}
