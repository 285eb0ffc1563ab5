package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// The picture's measures, in its own units.
const (
	chartWidth, chartHeight = 900, 480
	plotLeft, plotRight     = 70, 880
	plotTop, plotBottom     = 96, 430
)

// The colours are told apart by those who see few, too, on white and on black.
const chartStyle = `
text { font: 13px system-ui, sans-serif; fill: #333 }
.title { font-size: 16px; font-weight: 600 }
.back { fill: #fff }
.grid { stroke: #8884; stroke-width: 1 }
.axis { stroke: #888; stroke-width: 1; fill: none }
.mark { stroke: #888; stroke-width: 1.5; stroke-dasharray: 4 4 }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.dots { fill: none; stroke-width: 4; stroke-linecap: round; opacity: .22 }
.s0 { stroke: #c44e00 } .s1 { stroke: #0067b1 } .s2 { stroke: #008a63; stroke-dasharray: 8 4 }
.s3 { stroke: #8a3fb0 } .s4 { stroke: #807000 }
.dots.s2 { stroke-dasharray: none }
@media (prefers-color-scheme: dark) {
	text { fill: #ddd } .back { fill: #16181c }
	.s0 { stroke: #ff9a55 } .s1 { stroke: #5db4ff } .s2 { stroke: #3fd6a8 }
	.s3 { stroke: #cf95ee } .s4 { stroke: #d2c03c }
}`

// chart is a picture of the time to first token over time. Both axes are in
// seconds, the vertical one is logarithmic.
type chart struct {
	strings.Builder
	end       float64 // of the horizontal axis
	low, high float64 // the vertical one's ends, as powers of ten
	bin       float64 // the width that a line's points are the means of
}

// draw draws the picture of the runs as an SVG file.
func draw(w io.Writer, results []*result) error {
	c := newChart(results)
	c.frame()
	c.horizontal()
	c.vertical()
	for i, r := range results {
		c.dots(i, r.samples)
	}
	for i, r := range results {
		c.line(i, r.samples)
		c.legend(i, len(results), r.name)
		if r.lived > 0 {
			c.mark(r.died, "end", fmt.Sprintf("e%d dies", mortal+1))
			c.mark(r.lived, "start", fmt.Sprintf("e%d is back, with an empty cache", mortal+1))
		}
	}
	c.WriteString("</svg>\n")
	_, err := io.WriteString(w, c.String())
	return err
}

// newChart returns a chart whose axes hold all samples.
func newChart(results []*result) *chart {
	c := &chart{end: 1}
	least, most := math.Inf(1), 0.0
	for _, r := range results {
		for _, s := range r.samples {
			c.end = max(c.end, s.at.Seconds())
			least, most = min(least, s.ttft.Seconds()), max(most, s.ttft.Seconds())
		}
	}
	c.low, c.high = -1, 0
	if most > 0 {
		c.low = math.Floor(math.Log10(max(least, 0.001)))
		c.high = max(math.Ceil(math.Log10(most)), c.low+1)
	}
	c.bin = tidy(c.end / 40)
	return c
}

// tidy returns the least of 1, 2 and 5 times a power of ten that is not below x.
func tidy(x float64) float64 {
	base := math.Pow(10, math.Floor(math.Log10(x)))
	for _, f := range [...]float64{1, 2, 5} {
		if f*base >= x {
			return f * base
		}
	}
	return 10 * base
}

func (c *chart) x(seconds float64) float64 {
	return plotLeft + (plotRight-plotLeft)*seconds/c.end
}

func (c *chart) y(seconds float64) float64 {
	at := math.Log10(max(seconds, math.Pow(10, c.low)))
	return plotBottom - (plotBottom-plotTop)*(at-c.low)/(c.high-c.low)
}

func (c *chart) printf(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

// label writes text, anchored at its start, middle or end.
func (c *chart) label(x, y float64, anchor, text string) {
	c.printf(`<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, x, y, anchor, escaped(text))
}

func escaped(text string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(text)) //nolint:errcheck // a Builder takes all
	return b.String()
}

// frame begins the picture.
func (c *chart) frame() {
	const title = "Time to first token of a chat workload on four engines"
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" role="img" aria-label="%s">`, chartWidth, chartHeight, title)
	c.printf(`<style>%s</style>`, chartStyle)
	c.printf(`<rect class="back" width="%d" height="%d"/>`, chartWidth, chartHeight)
	c.printf(`<text class="title" x="%d" y="26">%s</text>`, plotLeft, title)
	c.printf(`<path class="axis" d="M%d %dV%dH%d"/>`, plotLeft, plotTop, plotBottom, plotRight)
}

func (c *chart) horizontal() {
	step := tidy(c.end / 11)
	for s := 0.0; s <= c.end; s += step {
		c.label(c.x(s), plotBottom+18, "middle", fmt.Sprintf("%g", s))
	}
	c.label((plotLeft+plotRight)/2, plotBottom+40, "middle", "when the question was asked, in seconds of the engines' time")
}

func (c *chart) vertical() {
	for e := c.low; e <= c.high; e++ {
		for _, f := range [...]float64{1, 2, 5} {
			s := f * math.Pow(10, e)
			if s > math.Pow(10, c.high)*1.001 {
				break
			}
			y := c.y(s)
			c.printf(`<path class="grid" d="M%d %.1fH%d"/>`, plotLeft, y, plotRight)
			c.label(plotLeft-8, y+4, "end", fmt.Sprintf("%.3g", s))
		}
	}
	middle := (plotTop + plotBottom) / 2
	c.printf(`<text transform="translate(20 %d) rotate(-90)" text-anchor="middle">time to first token, in seconds</text>`, middle)
}

// dots draws a dot for each turn.
func (c *chart) dots(i int, samples []sample) {
	c.printf(`<path class="dots s%d" d="`, i)
	for _, s := range samples {
		c.printf("M%.1f %.1fh0", c.x(s.at.Seconds()), c.y(s.ttft.Seconds()))
	}
	c.printf(`"/>`)
}

// line draws the means over the bins that have samples.
func (c *chart) line(i int, samples []sample) {
	n := int(c.end/c.bin) + 1
	sum, count := make([]float64, n), make([]float64, n)
	for _, s := range samples {
		b := int(s.at.Seconds() / c.bin)
		sum[b] += s.ttft.Seconds()
		count[b]++
	}
	c.printf(`<path class="line s%d" d="`, i)
	next := "M"
	for b := range sum {
		if count[b] > 0 {
			c.printf("%s%.1f %.1f", next, c.x(min((float64(b)+0.5)*c.bin, c.end)), c.y(sum[b]/count[b]))
			next = "L"
		}
	}
	c.printf(`"/>`)
}

// legend names one of n lines, in a row above the plot.
func (c *chart) legend(i, n int, name string) {
	x := float64(plotLeft + min(190, (plotRight-plotLeft)/n)*i)
	c.printf(`<path class="line s%d" d="M%.1f 48h36"/>`, i, x)
	c.label(x+44, 52, "start", name)
	if i == 0 {
		c.label(plotRight, 26, "end", fmt.Sprintf("lines: means of %g s; dots: turns", c.bin))
	}
}

// mark marks a moment, with text that has its end or its start there.
func (c *chart) mark(at time.Duration, anchor, what string) {
	x := c.x(at.Seconds())
	c.printf(`<path class="mark" d="M%.1f %dV%d"/>`, x, plotTop-10, plotBottom)
	c.label(x, plotTop-15, anchor, what)
}
