package main

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// Sizes in the picture, in pixels.
const (
	pictureWidth, pictureRow, pictureGap = 800, 18, 34
	pictureLeft, pictureRight            = 190, 130
)

// draw draws the mean TTFT of each policy in each cell as bars on one scale, as SVG.
func (o *options) draw(w io.Writer, cells []*cell) error {
	most, height, base := 0.0, 70, o.policies[0]
	for _, c := range cells {
		height += pictureGap + pictureRow*len(c.policies)
		for _, r := range c.policies {
			most = max(most, r.MeanTTFT)
		}
	}
	step := roundStep(most)
	scale := float64(pictureWidth-pictureLeft-pictureRight) / max(step, most)
	x := func(ms float64) float64 { return pictureLeft + ms*scale }
	p := printer{w: w}
	p.f(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img" `+
		`font-family="sans-serif" font-size="13" fill="#222">`, pictureWidth, height)
	p.f(`<title>Mean time to the first token of each policy: lower is better</title>`)
	p.f(`<rect width="100%%" height="100%%" fill="#fff"/>`)
	p.f(`<text x="10" y="22" font-size="15">Mean time to the first token in ms: lower is better</text>`)
	for ms := 0.0; ms <= most; ms += step {
		p.f(`<line x1="%.1f" y1="48" x2="%.1[1]f" y2="%[2]d" stroke="#ddd"/>`, x(ms), height-10)
		p.f(`<text x="%.1f" y="42" text-anchor="middle" fill="#555">%g</text>`, x(ms), ms)
	}
	y := 48
	for _, c := range cells {
		y += pictureGap
		p.f(`<text x="10" y="%d" font-weight="bold">%s</text>`, y-8, html.EscapeString(fmt.Sprintf(
			"%s, %d workers of %dK tokens, speed %.3g, sessions: %s", c.trace.Name, c.workers, c.kv/1000, c.speed, c.sessions)))
		for _, name := range o.names() {
			r := c.policies[name]
			if r == nil {
				continue
			}
			color := "#7d9cc0"
			if name == base {
				color = "#888"
			}
			p.f(`<text x="%d" y="%d" text-anchor="end">%s</text>`, pictureLeft-6, y+12, html.EscapeString(name))
			p.f(`<rect x="%d" y="%d" width="%.1f" height="12" fill="%s"/>`, pictureLeft, y+2, r.MeanTTFT*scale, color)
			p.f(`<text x="%.1f" y="%d">%.4g, %.2f×</text>`, x(r.MeanTTFT)+5, y+12, r.MeanTTFT, r.Relative.MeanTTFT)
			y += pictureRow
		}
	}
	p.f(`</svg>`)
	return p.err
}

// drawMeans draws the geometric means of the mean TTFT over all cells as bars, the lowest first.
// A picture of each cell of a suite could not be read.
func (o *options) drawMeans(w io.Writer, totals []*total) error {
	totals = slices.Clone(totals)
	slices.SortStableFunc(totals, func(a, b *total) int { return cmp.Compare(a.meanTTFT, b.meanTTFT) })
	most := totals[len(totals)-1].meanTTFT
	step := roundStep(most)
	scale := float64(pictureWidth-pictureLeft-pictureRight) / max(step, most)
	height := 70 + pictureRow*len(totals)
	p := printer{w: w}
	p.f(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img" aria-labelledby="title desc" `+
		`font-family="sans-serif" font-size="14" fill="#222">`, pictureWidth, height)
	p.f(`<title id="title">Mean time to the first token relative to %s: lower is better</title>`, html.EscapeString(o.policies[0]))
	words := make([]string, len(totals))
	for i, t := range totals {
		words[i] = fmt.Sprintf("%s %.2f", t.policy, t.meanTTFT)
	}
	p.f(`<desc id="desc">%s</desc>`, html.EscapeString(strings.Join(words, ", ")))
	p.f(`<rect width="100%%" height="100%%" fill="#fff"/>`)
	p.f(`<text x="10" y="22" font-size="16">Mean time to the first token relative to %s: lower is better</text>`, html.EscapeString(o.policies[0]))
	for v := 0.0; v <= most; v += step {
		p.f(`<line x1="%.1f" y1="48" x2="%.1[1]f" y2="%[2]d" stroke="#ddd"/>`, pictureLeft+v*scale, height-10)
		p.f(`<text x="%.1f" y="42" text-anchor="middle" fill="#555">%.3g</text>`, pictureLeft+v*scale, v)
	}
	for i, t := range totals {
		y, color := 54+pictureRow*i, "#7d9cc0"
		if t.policy == o.policies[0] {
			color = "#888"
		}
		p.f(`<text x="%d" y="%d" text-anchor="end">%s</text>`, pictureLeft-6, y+11, html.EscapeString(t.policy))
		p.f(`<rect x="%d" y="%d" width="%.1f" height="12" fill="%s"/>`, pictureLeft, y, t.meanTTFT*scale, color)
		p.f(`<text x="%.1f" y="%d">%.2f</text>`, pictureLeft+t.meanTTFT*scale+5, y+11, t.meanTTFT)
	}
	p.f(`</svg>`)
	return p.err
}

// roundStep returns the distance between two lines of a scale that ends at most: 1, 2 or 5 times a
// power of ten.
func roundStep(most float64) float64 {
	if most <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(most/4)))
	steps := []float64{1, 2, 5, 10}
	i, _ := slices.BinarySearch(steps, most/4/power)
	return steps[min(i, 3)] * power
}

// printer writes lines until one fails.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) f(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}
