package pool

import (
	"testing"
	"time"
)

func budgetOf(set RetryBudget) *budget {
	r := &registry{log: log{Name: "test"}}
	r.Settings.Store(&Settings{RetryBudget: &set})
	return &budget{pool: r}
}

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
		b, got := budgetOf(RetryBudget{Percent: v.percent, PerSecond: v.rate}), 0
		for range v.requests {
			b.Request(epoch)
		}
		for b.Charge(epoch) {
			got++
		}
		if got != v.want {
			t.Errorf("%v %% and %v a second of %d requests: %d retries, want %d", v.percent, v.rate, v.requests, got, v.want)
		}
	}
}

// TestBudgetComesBack makes a request a tenth of a second, and as many retries as there may be.
func TestBudgetComesBack(t *testing.T) {
	b, retries := budgetOf(RetryBudget{Percent: 20, PerSecond: 0.5}), 0
	for i := range 1000 {
		at := epoch.Add(time.Duration(i) * 100 * time.Millisecond)
		for b.Request(at); b.Charge(at); {
			retries++
		}
	}
	// 100 s: 20 % of 1000 requests, 0.5 a second, and what one memory holds at the start
	if retries < 240 || retries > 260 {
		t.Errorf("%d retries, want about 250", retries)
	}
}
