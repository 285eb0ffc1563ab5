package chart

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// Panel is a chart of lines over a common time.
type Panel struct {
	// Name is what the values are.
	Name string
	// Lines are the points of each name; those with a Y of 0 are left out.
	Lines [][]Point
}

// Point is a value at a time in seconds.
type Point struct{ X, Y float64 }

// Lines draws panels below each other, with one line for each name.
func Lines(w io.Writer, title string, names []string, panels []Panel) error {
	p := new(page)
	y := p.head(title, names)
	for _, panel := range panels {
		a, last := panel.axis(y)
		p.grid(a, panel.Name)
		for i := range 11 {
			t := last * float64(i) / 10
			p.text(left+(width-left-right)*float64(i)/10, y+height+14, `text-anchor="middle"`, fmt.Sprintf("%.4g", t))
		}
		p.text(left, y+height+28, `fill="#666"`, "seconds since the start")
		for k, line := range panel.Lines {
			var points strings.Builder
			for _, q := range line {
				if q.Y > 0 {
					fmt.Fprintf(&points, "%.1f,%.1f ", left+(width-left-right)*q.X/last, a.at(q.Y))
				}
			}
			p.add(`<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>`, strings.TrimSpace(points.String()), colour(k))
		}
		y += height + below
	}
	p.tall = y
	return p.writeTo(w)
}

// axis returns the axis of the values, logarithmic if they are far apart, and the
// last time.
func (panel *Panel) axis(y float64) (a axis, last float64) {
	low, high := math.Inf(1), 0.0
	for _, line := range panel.Lines {
		for _, q := range line {
			last = max(last, q.X)
			if q.Y > 0 {
				low, high = min(low, q.Y), max(high, q.Y)
			}
		}
	}
	if high == 0 {
		low, high = 0, 1
	}
	if low > 0 && high/low > 20 {
		return axis{low: low * 0.9, high: high * 1.1, log: true, y: y}, max(last, 1e-9)
	}
	return axis{high: high * 1.05, y: y}, max(last, 1e-9)
}
