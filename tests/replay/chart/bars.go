package chart

import (
	"fmt"
	"io"
	"math"
)

// Group is a group of bars, one for each name; 0 is none.
type Group struct {
	// Lines are the lines of its label.
	Lines  []string
	Values []float64
}

// Bars draws ratios to a base on a logarithmic axis: bars go up from 1 or down from
// it. Values beyond the axis, from 0.02 to 10, are cut and written on the bar.
func Bars(w io.Writer, title string, names []string, groups []Group) error {
	p := new(page)
	y := p.head(title, names)
	low, high := 0.5, 2.0
	for _, g := range groups {
		for _, v := range g.Values {
			if v > 0 {
				low, high = max(0.02, min(low, v)), min(10, max(high, v))
			}
		}
	}
	const bar, gap = 8.0, 18.0
	room := math.Max(90, bar*float64(len(names))+gap)
	each := max(1, int((width-left-right)/room))
	for len(groups) > 0 {
		n := min(each, len(groups))
		a := axis{low: low * 0.95, high: high * 1.05, log: true, y: y}
		p.grid(a, "relative to "+names[0])
		one := a.at(1)
		for i, g := range groups[:n] {
			x := left + float64(i)*room + gap/2
			for k, v := range g.Values {
				if v <= 0 {
					continue
				}
				end := a.at(v)
				p.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`,
					x+bar*float64(k), min(one, end), bar-1, math.Max(0.8, math.Abs(one-end)), colour(k))
				if v > 10 {
					p.text(x+bar*float64(k), y+9, `font-size="9"`, fmt.Sprintf("%.0f", v))
				}
			}
			for k, line := range g.Lines {
				p.text(x, y+height+14+12*float64(k), `font-size="9"`, line)
			}
		}
		p.line(left, one, width-right, one, `stroke="#444"`)
		y += height + below
		groups = groups[n:]
	}
	p.tall = y
	return p.writeTo(w)
}
