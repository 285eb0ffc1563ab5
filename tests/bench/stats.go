package main

import (
	"math"
	"slices"
	"strconv"
	"time"
)

// figure is a measured value; NaN is unknown.
type figure float64

var unknown = figure(math.NaN())

func (f figure) known() bool { return !math.IsNaN(float64(f)) && !math.IsInf(float64(f), 0) }

// MarshalJSON implements json.Marshaler: what is unknown is null.
func (f figure) MarshalJSON() ([]byte, error) {
	if !f.known() {
		return []byte("null"), nil
	}
	return strconv.AppendFloat(nil, float64(f), 'g', 6, 64), nil
}

// text writes the figure with so many digits, as far as they stand behind the
// point.
func (f figure) text(digits int) string {
	if !f.known() {
		return "–"
	}
	before := 0
	if v := math.Abs(float64(f)); v >= 1 {
		before = 1 + int(math.Log10(v))
	}
	return strconv.FormatFloat(float64(f), 'f', max(0, digits-before), 64)
}

func milliseconds(d time.Duration) figure {
	return figure(float64(d) / float64(time.Millisecond))
}

// percentile returns the value in milliseconds that a share q of the sorted
// durations does not exceed (nearest rank); unknown of none.
func percentile(sorted []time.Duration, q float64) figure {
	if len(sorted) == 0 {
		return unknown
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return milliseconds(sorted[min(max(rank, 1), len(sorted))-1])
}

// spread is a median with what it is the median of.
type spread struct{ Median, Min, Max figure }

// spreadOf returns the spread of the known ones among some figures; of an even
// number the median is the mean of the middle two.
func spreadOf(figures []figure) spread {
	var sorted []figure
	for _, f := range figures {
		if f.known() {
			sorted = append(sorted, f)
		}
	}
	if len(sorted) == 0 {
		return spread{unknown, unknown, unknown}
	}
	slices.Sort(sorted)
	mid := len(sorted) / 2
	s := spread{sorted[mid], sorted[0], sorted[len(sorted)-1]}
	if len(sorted)%2 == 0 {
		s.Median = (sorted[mid-1] + sorted[mid]) / 2
	}
	return s
}

// ratios returns a/b for each round that both have a figure of, by round.
func ratios(a, b map[int]figure) []figure {
	var list []figure
	for round, x := range a {
		if y, both := b[round]; both && x.known() && y.known() && y != 0 {
			list = append(list, x/y)
		}
	}
	return list
}
