package pool

import (
	"testing"
	"time"
)

// TestBudgetIsAShareAndARate spends what there is, at several loads.
func TestBudgetIsAShareAndARate(t *testing.T) {
	for _, v := range []struct {
		percent, rate float64
		requests      int
		want          int
	}{
		{20, 10, 0, 100},
		{20, 10, 1000, 300},
		{20, 0, 1000, 200},
		{0, 1.5, 1000, 15},
		{0, 0, 1000, 0},
		{150, 0, 10, 15},
		{10, 0, 11, 2}, // it begins to be spent as long as anything is left
	} {
		var s spending
		for range v.requests {
			s.Request(epoch)
		}
		got := 0
		for s.retry(epoch, &RetryBudget{Percent: v.percent, PerSecond: v.rate}) {
			got++
		}
		if got != v.want {
			t.Errorf("%v %% and %v a second of %d requests: %d retries, want %d", v.percent, v.rate, v.requests, got, v.want)
		}
	}
}

// TestBudgetSlides makes a request a tenth of a second, and as many retries as
// there may be. In no ten seconds are there more than the budget says.
func TestBudgetSlides(t *testing.T) {
	var s spending
	b := &RetryBudget{Percent: 20, PerSecond: 0.5}
	made := make(map[int64]int)
	requests := make(map[int64]int)
	for i := range 1000 {
		at := epoch.Add(time.Duration(i) * 100 * time.Millisecond)
		s.Request(at)
		requests[at.Unix()]++
		for s.retry(at, b) {
			made[at.Unix()]++
		}
		sum, of := 0, 0
		for back := range int64(budgetWindow) {
			sum, of = sum+made[at.Unix()-back], of+requests[at.Unix()-back]
		}
		// what was begun to be spent may be one more; requests that leave the
		// window leave their retries behind for no longer than these last
		if most := 0.2*float64(of+10) + 5 + 1; float64(sum) > most {
			t.Fatalf("after %v: %d retries for %d requests, want at most %v", at.Sub(epoch), sum, of, most)
		}
	}
	if n := len(made); n < 30 {
		t.Errorf("retries in %d of 100 seconds: the budget does not come back", n)
	}
}
