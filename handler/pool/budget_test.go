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

// TestBudgetComesBack makes a request a tenth of a second, and as many retries as there may be.
func TestBudgetComesBack(t *testing.T) {
	var s spending
	b, retries := &RetryBudget{Percent: 20, PerSecond: 0.5}, 0
	for i := range 1000 {
		at := epoch.Add(time.Duration(i) * 100 * time.Millisecond)
		for s.Request(at); s.retry(at, b); {
			retries++
		}
	}
	// 100 s: 20 % of 1000 requests, 0.5 a second, and what one memory holds at the start
	if retries < 240 || retries > 260 {
		t.Errorf("%d retries, want about 250", retries)
	}
}
