// Package chart draws measurements as bars on one scale, as an SVG file that fits light and dark pages.
package chart

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// Chart is a picture. Its panels stand below each other.
type Chart struct {
	Title  string // also what is better
	Notes  []string
	Unit   string // of the values; empty for ratios
	Panels []Panel
}

// Panel is bars below a heading.
type Panel struct {
	Title, About string
	Bars         []Bar
}

// Bar is one measurement.
type Bar struct {
	Name, Caption string
	Value         float64
	Least, Most   float64 // of several measurements; both 0 for one
	Own           bool    // of kv_router
}

// The picture's measures, in its own units.
const (
	width     = 860
	margin    = 14
	barLeft   = 180
	barRight  = 600
	rowHeight = 25
	panelHead = 34
)

const style = `
text { font: 15px system-ui, sans-serif; fill: #333 }
.title { font-size: 18px; font-weight: 600 }
.panel { font-weight: 600 }
.small { font-size: 14px; fill: #595959 }
.back { fill: #fff }
.other { fill: #d8a27c }
.ours { fill: #4a9ad4 }
.range { stroke: #333; stroke-width: 1.5; fill: none }
.tick { stroke: #999; stroke-width: 0.5 }
@media (prefers-color-scheme: dark) {
	text { fill: #ddd } .small { fill: #aaa } .back { fill: #16181c }
	.other { fill: #b0703f } .ours { fill: #2f7fbf } .range { stroke: #ddd } .tick { stroke: #666 }
}`

// Draw writes the SVG file. Readers who cannot see it get the captions as its description.
func (c *Chart) Draw(w io.Writer) error {
	most, rows := 0.0, 0
	var words []string
	for _, p := range c.Panels {
		rows += len(p.Bars)
		if p.Title != "" {
			words = append(words, p.Title+".")
		}
		for _, b := range p.Bars {
			most = max(most, b.Value, b.Most)
			words = append(words, b.Name+": "+b.Caption+".")
		}
	}
	step := stepOf(most)
	most = step * max(1, math.Ceil(most/step))
	top := 60 + 18*len(c.Notes)
	bottom := top + panelHead*len(c.Panels) + rowHeight*rows + 2*margin
	p := picture{w: w, scale: (barRight - barLeft) / most}
	p.line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" role="img" aria-labelledby="title desc">`, width, bottom)
	p.line(`<title id="title">%s</title>`, escaped(c.Title))
	p.line(`<desc id="desc">%s</desc>`, escaped(strings.Join(words, " ")))
	p.line(`<style>%s</style>`, style)
	p.line(`<rect class="back" width="%d" height="%d"/>`, width, bottom)
	p.text(margin, 28, "title", "start", c.Title)
	for i, note := range c.Notes {
		p.text(margin, 50+18*i, "small", "start", note)
	}
	for v := 0.0; v <= most+step/2; v += step {
		p.line(`<path class="tick" d="M%.1f %dV%d"/>`, p.at(v), top, bottom-margin)
		p.text(p.at(v), top-4, "small", "middle", strings.TrimSpace(fmt.Sprintf("%.6g %s", v, c.Unit)))
	}
	for _, panel := range c.Panels {
		p.line(`<text x="%d" y="%d"><tspan class="panel">%s</tspan> <tspan class="small">%s</tspan></text>`,
			margin, top+22, escaped(panel.Title), escaped(panel.About))
		top += panelHead
		for _, b := range panel.Bars {
			p.bar(top, &b)
			top += rowHeight
		}
	}
	p.line("</svg>")
	return p.err
}

// stepOf returns the distance between two lines of a scale that ends at most: 1, 2 or 5 times a power
// of ten.
func stepOf(most float64) float64 {
	if most <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(most/4)))
	for _, n := range []float64{5, 2} {
		if n*power <= most/4 {
			return n * power
		}
	}
	return power
}

// picture writes lines until one fails.
type picture struct {
	w     io.Writer
	scale float64
	err   error
}

func (p *picture) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// text writes text, anchored at its start, middle or end.
func (p *picture) text(x float64, y int, class, anchor, text string) {
	p.line(`<text class="%s" x="%.1f" y="%d" text-anchor="%s">%s</text>`, class, x, y, anchor, escaped(text))
}

// at returns the place of a value on the scale.
func (p *picture) at(v float64) float64 { return barLeft + v*p.scale }

func (p *picture) bar(y int, b *Bar) {
	class := "other"
	if b.Own {
		class = "ours"
	}
	p.text(barLeft-8, y+14, "", "end", b.Name)
	p.line(`<rect class="%s" x="%d" y="%d" width="%.1f" height="%d"/>`, class, barLeft, y, b.Value*p.scale, rowHeight-6)
	if b.Most > 0 {
		p.line(`<path class="range" d="M%.1f %.1fH%.1f"/>`, p.at(b.Least), float64(y)+(rowHeight-6)/2.0, p.at(b.Most))
	}
	p.text(barRight+12, y+14, "", "start", b.Caption)
}

func escaped(text string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(text)) //nolint:errcheck // a Builder takes all
	return b.String()
}
