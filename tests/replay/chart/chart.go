// Package chart draws charts as SVG: bars of ratios and lines over time. It knows
// nothing of what it draws, and the same data gives the same bytes.
package chart

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// colours are told apart by most readers; the first is that of the base.
var colours = []string{
	"#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#00429d", "#111111",
}

const (
	width  = 1200.0
	left   = 60.0 // of the plot, for the axis's labels
	right  = 15.0
	top    = 52.0 // of the first panel, for title and legend
	height = 190.0
	below  = 62.0 // each panel, for the labels of x
)

// page is an SVG document in progress.
type page struct {
	b    strings.Builder
	tall float64
}

func (p *page) add(format string, args ...any) { fmt.Fprintf(&p.b, format+"\n", args...) }

func (p *page) line(x1, y1, x2, y2 float64, style string) {
	p.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" %s/>`, x1, y1, x2, y2, style)
}

func (p *page) text(x, y float64, style, text string) {
	p.add(`<text x="%.1f" y="%.1f" %s>%s</text>`, x, y, style, escape(text))
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes all
	return b.String()
}

// head writes title and legend. It returns where the first panel begins.
func (p *page) head(title string, names []string) float64 {
	p.text(left, 20, `font-size="15"`, title)
	x, y := left, 40.0
	for i, name := range names {
		room := 26 + 6.8*float64(len(name))
		if x+room > width-right && x > left {
			x, y = left, y+16
		}
		p.add(`<rect x="%.1f" y="%.1f" width="11" height="11" fill="%s"/>`, x, y-9, colour(i))
		p.text(x+15, y, "", name)
		x += room
	}
	return y + top - 40
}

func (p *page) writeTo(w io.Writer) error {
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" font-family="sans-serif" font-size="11" fill="#222">
<rect width="100%%" height="100%%" fill="#ffffff"/>
%s</svg>
`, width, p.tall, width, p.tall, p.b.String())
	return err
}

func colour(i int) string { return colours[i%len(colours)] }

// axis maps values to heights within a panel.
type axis struct {
	low, high float64
	log       bool
	y         float64 // of the panel's top
}

func (a axis) at(v float64) float64 {
	low, high := a.low, a.high
	if a.log {
		v, low, high = math.Log(max(v, a.low)), math.Log(low), math.Log(high)
	}
	share := (v - low) / (high - low)
	return a.y + height*(1-min(1, max(0, share)))
}

// ticks returns round values within the axis.
func (a axis) ticks() (values []float64) {
	if !a.log {
		step := math.Pow(10, math.Floor(math.Log10(a.high-a.low)))
		if (a.high-a.low)/step < 3 {
			step /= 4
		}
		for v := a.low; v <= a.high*1.0001; v += step {
			values = append(values, v)
		}
		return values
	}
	steps := []float64{1, 2, 5}
	if a.high/a.low > 1000 {
		steps = steps[:1]
	}
	for decade := math.Pow(10, math.Floor(math.Log10(a.low))); decade <= a.high; decade *= 10 {
		for _, step := range steps {
			if v := decade * step; v >= a.low*0.999 && v <= a.high*1.001 {
				values = append(values, v)
			}
		}
	}
	return values
}

// grid draws an axis with its ticks and a name.
func (p *page) grid(a axis, name string) {
	for _, v := range a.ticks() {
		y := a.at(v)
		p.line(left, y, width-right, y, `stroke="#e4e4e4"`)
		p.text(left-6, y+4, `text-anchor="end"`, fmt.Sprintf("%.3g", v))
	}
	p.line(left, a.y, left, a.y+height, `stroke="#888"`)
	p.line(left, a.y+height, width-right, a.y+height, `stroke="#888"`)
	p.text(left+4, a.y+11, `fill="#666"`, name)
}
