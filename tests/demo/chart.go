package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// The picture's measures, in its own units. It has two panels beside each other.
const (
	chartWidth = 900
	panelWidth = 430
	panelGap   = 20
	margin     = 10
	barLeft    = 125 // in a panel, as the next one
	barRight   = 235
	rowHeight  = 24
	headHeight = 78
	panelHead  = 32
)

// Both colours are readable on white and on black.
const chartStyle = `
text { font: 13px system-ui, sans-serif; fill: #333 }
.title { font-size: 16px; font-weight: 600 }
.panel { font-weight: 600 }
.small { font-size: 12px; fill: #666 }
.back { fill: #fff }
.other { fill: #d8a27c }
.ours { fill: #4a9ad4 }
.range { stroke: #333; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
	text { fill: #ddd } .small { fill: #aaa } .back { fill: #16181c }
	.other { fill: #b0703f } .ours { fill: #2f7fbf } .range { stroke: #ddd }
}`

// chart is a picture of the mean times to first token.
type chart struct{ strings.Builder }

func (c *chart) printf(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

// label writes text, anchored at its start or end.
func (c *chart) label(x, y float64, class, anchor, text string) {
	c.printf(`<text class="%s" x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, class, x, y, anchor, escaped(text))
}

func escaped(text string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(text)) //nolint:errcheck // a Builder takes all
	return b.String()
}

// draw draws the picture as an SVG file.
func (r *result) draw(w io.Writer) error {
	const title = "Mean time to first token, four engines"
	height := panelHead + rowHeight*len(r.cells[0]) + panelGap
	bottom := headHeight + height*((len(r.cells)+1)/2)
	var c chart
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" role="img" aria-label="%s">`,
		chartWidth, bottom, title)
	c.printf(`<style>%s</style>`, chartStyle)
	c.printf(`<rect class="back" width="%d" height="%d"/>`, chartWidth, bottom)
	c.label(margin, 24, "title", "start", title)
	c.label(margin, 44, "small", "start", fmt.Sprintf("Seconds: median, least and most of %d seeds from %d on. %%: cached prompt tokens. "+
		"failed: no token came. broken: one had come.", r.seeds, r.seed))
	c.label(margin, 60, "small", "start", fmt.Sprintf("Engines: %s, simulated at %gx speed. Outside them pass %.2f to %.2f s.",
		hardware, r.speed, r.machine.outside[0].time, r.machine.outside[len(r.machine.outside)-1].time))
	for i, cells := range r.cells {
		c.panel(float64(margin+(panelWidth+panelGap)*(i%2)), float64(headHeight+height*(i/2)), cells)
	}
	c.WriteString("</svg>\n")
	_, err := io.WriteString(w, c.String())
	return err
}

// panel draws a workload.
func (c *chart) panel(left, top float64, cells []*cell) {
	most := 0.0
	for _, x := range cells {
		most = max(most, x.mean.most)
	}
	if most == 0 {
		most = 1
	}
	at := func(seconds float64) float64 { return left + barLeft + (barRight-barLeft)*seconds/most }
	load := cells[0].runs[0].load
	c.printf(`<text x="%.1f" y="%.1f"><tspan class="panel">%s</tspan> <tspan class="small">%s</tspan></text>`,
		left, top+18, escaped(load.title), escaped(load.about))
	for i, x := range cells {
		y := top + panelHead + float64(i*rowHeight)
		class := "other"
		if strings.HasPrefix(x.name, "kv_router") {
			class = "ours"
		}
		c.label(left+barLeft-8, y+13, "", "end", x.name)
		c.printf(`<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%d"/>`, class, at(0), y, at(x.mean.median)-at(0), rowHeight-6)
		c.printf(`<path class="range" d="M%.1f %.1fH%.1f"/>`, at(x.mean.least), y+(rowHeight-6)/2, at(x.mean.most))
		c.label(left+barRight+8, y+13, "", "start", x.caption())
	}
}

// caption is what stands beside a bar.
func (c *cell) caption() string {
	if c.runs[0].load.deaths == 0 {
		return fmt.Sprintf("%s s, %.0f %%", digits(c.mean.median), c.hits.median)
	}
	failed, broken, _, _ := c.casualties()
	return fmt.Sprintf("%s s, %d failed, %d broken", digits(c.mean.median), failed, broken)
}
