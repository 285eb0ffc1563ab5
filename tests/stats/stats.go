// Package stats has the few statistics that the tools below tests need.
package stats

import (
	"cmp"
	"math"
	"slices"
)

// Percentile returns the value that a share q of the sorted values does not exceed
// (nearest rank). There must be at least one value.
func Percentile[T any](sorted []T, q float64) T {
	const rounding = 1e-6 // 0.99 times 700 is above 693
	rank := int(math.Ceil(q*float64(len(sorted)) - rounding))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Spread is the median of several runs, with the least and the most.
type Spread struct{ Least, Median, Most float64 }

// Over returns the spread of a figure over the items of a list. The median of an even
// number of values is the mean of the middle two. All three are 0 if the list is empty.
func Over[T any](list []T, get func(T) float64) Spread {
	if len(list) == 0 {
		return Spread{}
	}
	values := make([]float64, len(list))
	for i, x := range list {
		values[i] = get(x)
	}
	slices.SortFunc(values, cmp.Compare)
	n := len(values)
	return Spread{values[0], (values[(n-1)/2] + values[n/2]) / 2, values[n-1]}
}

// Of returns the spread of some values.
func Of(values []float64) Spread {
	return Over(values, func(x float64) float64 { return x })
}
