package sim

import (
	"math"
	"testing"
)

func TestMeanOverSeeds(t *testing.T) {
	a := &Result{Policy: "x", Figures: Figures{MeanTTFT: 10, P99TTFT: 100, HitRatio: 0.5}, Expired: 1}
	b := &Result{Policy: "x", Figures: Figures{MeanTTFT: 40, P99TTFT: 100}, Expired: 2}
	m := Mean([]*Result{a, b})
	if math.Abs(m.MeanTTFT-20) > 1e-9 || math.Abs(m.P99TTFT-100) > 1e-9 || m.HitRatio != 0 || m.Spread != 3 || m.Expired != 3 {
		t.Errorf("the mean is %+v", m)
	}
	if a.MeanTTFT != 10 || a.Expired != 1 {
		t.Errorf("a seed changed: %+v", a)
	}
	if one := Mean([]*Result{a}); one.Figures != a.Figures || one.Spread != 0 {
		t.Errorf("the mean of one is %+v", one)
	}
}
