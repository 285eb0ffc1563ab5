package sim

import (
	"math"
)

// Mean returns the geometric means of the figures of one cell with several seeds,
// and how far its mean TTFTs are apart.
func Mean(seeds []*Result) *Result {
	m := *seeds[0]
	m.Relative = nil
	lowest, highest := m.MeanTTFT, m.MeanTTFT
	for _, r := range seeds[1:] {
		lowest, highest = min(lowest, r.MeanTTFT), max(highest, r.MeanTTFT)
		m.PolicyFaults += r.PolicyFaults
		m.Expired += r.Expired
		m.Untracked += r.Untracked
	}
	figures := m.fields()
	for i := range figures {
		*figures[i] = Geomean(len(seeds), func(k int) float64 { return *seeds[k].fields()[i] })
	}
	m.Spread = highest/lowest - 1
	return &m
}

// fields returns all figures.
func (f *Figures) fields() [7]*float64 {
	return [...]*float64{&f.MeanTTFT, &f.P50TTFT, &f.P99TTFT, &f.MeanE2E, &f.HitRatio, &f.Imbalance, &f.PerSecond}
}

// Geomean returns the geometric mean of n values; 0 if one of them is 0.
func Geomean(n int, value func(i int) float64) float64 {
	if n == 1 {
		return value(0)
	}
	sum := 0.0
	for i := range n {
		sum += math.Log(value(i))
	}
	return math.Exp(sum / float64(n))
}
