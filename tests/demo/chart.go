package main

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"strings"
)

// The picture's measures, in its own units. The panels stand below each other and have one scale.
const (
	chartWidth = 860
	margin     = 14
	barLeft    = 170
	barRight   = 600
	rowHeight  = 25
	headHeight = 96
	panelHead  = 34
)

const chartStyle = `
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

// chart is a picture of the mean times to first token.
type chart struct {
	strings.Builder
	most float64 // the end of the scale, in seconds
}

func (c *chart) printf(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

// label writes text, anchored at its start, middle or end.
func (c *chart) label(x, y float64, class, anchor, text string) {
	c.printf(`<text class="%s" x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, class, x, y, anchor, escaped(text))
}

// at returns the place of a time on the scale.
func (c *chart) at(seconds float64) float64 { return barLeft + (barRight-barLeft)*seconds/c.most }

func escaped(text string) string {
	var b strings.Builder
	xml.EscapeText(&b, []byte(text)) //nolint:errcheck // a Builder takes all
	return b.String()
}

// draw draws the picture as an SVG file.
func (r *result) draw(w io.Writer) error {
	const title = "Mean time to first token in seconds: lower is better"
	var c chart
	for _, cells := range r.cells {
		for _, x := range cells {
			c.most = max(c.most, x.mean.Most)
		}
	}
	c.most = math.Ceil(max(c.most, 1))
	height := panelHead + rowHeight*len(r.cells[0])
	bottom := headHeight + height*len(r.cells) + 2*margin
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%[1]d" height="%[2]d" role="img" aria-labelledby="title desc">`,
		chartWidth, bottom)
	c.printf(`<title id="title">%s</title>`, title)
	c.printf(`<desc id="desc">%s</desc>`, escaped(r.inWords()))
	c.printf(`<style>%s</style>`, chartStyle)
	c.printf(`<rect class="back" width="%d" height="%d"/>`, chartWidth, bottom)
	c.label(margin, 28, "title", "start", title)
	c.label(margin, 50, "small", "start", fmt.Sprintf("Bar: median of %d seeds; line: least to most. The router and the machine add %.2f s at most.",
		r.seeds, r.outside[len(r.outside)-1].time))
	c.label(margin, 68, "small", "start", fmt.Sprintf("%d engines: %s, simulated at %gx speed.", engineCount, hardware, r.speed))
	for s := 0.0; s <= c.most; s++ {
		c.printf(`<path class="tick" d="M%.1f %dV%d"/>`, c.at(s), headHeight, bottom-margin)
		c.label(c.at(s), headHeight-4, "small", "middle", fmt.Sprintf("%g s", s))
	}
	for i, cells := range r.cells {
		c.panel(float64(headHeight+height*i), cells)
	}
	c.WriteString("</svg>\n")
	_, err := io.WriteString(w, c.String())
	return err
}

// panel draws a workload.
func (c *chart) panel(top float64, cells []*cell) {
	load := cells[0].runs[0].load
	c.printf(`<text x="%d" y="%.1f"><tspan class="panel">%s</tspan> <tspan class="small">%s</tspan></text>`,
		margin, top+22, escaped(load.title), escaped(load.about))
	for i, x := range cells {
		y := top + panelHead + float64(i*rowHeight)
		class := "other"
		if x.own {
			class = "ours"
		}
		c.label(barLeft-8, y+14, "", "end", x.name)
		c.printf(`<rect class="%s" x="%d" y="%.1f" width="%.1f" height="%d"/>`, class, barLeft, y, c.at(x.mean.Median)-barLeft, rowHeight-6)
		c.printf(`<path class="range" d="M%.1f %.1fH%.1f"/>`, c.at(x.mean.Least), y+(rowHeight-6)/2, c.at(x.mean.Most))
		c.label(barRight+12, y+14, "", "start", x.caption())
	}
}

// caption is what stands beside a bar.
func (c *cell) caption() string {
	if c.runs[0].load.deaths == 0 {
		return fmt.Sprintf("%s s, %.0f %% cached", digits(c.mean.Median), c.hits.Median)
	}
	failed, broken, _, _ := c.casualties()
	return fmt.Sprintf("%s s, %d failed, %d broken", digits(c.mean.Median), failed, broken)
}

// inWords says what the picture shows, for readers who cannot see it.
func (r *result) inWords() string {
	var b strings.Builder
	for _, cells := range r.cells {
		fmt.Fprintf(&b, "%s.", cells[0].runs[0].load.title)
		for _, c := range cells {
			fmt.Fprintf(&b, " %s: %s.", c.name, c.caption())
		}
		b.WriteByte(' ')
	}
	return strings.TrimSpace(b.String())
}
