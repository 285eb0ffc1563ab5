package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/chart"
)

// ownPolicy is kv_router's default.
const ownPolicy = "predicted_latency"

// draw draws the mean TTFT of each policy in each cell as SVG.
func (o *options) draw(w io.Writer, cells []*cell) error {
	c := chart.Chart{Title: "Mean time to the first token in ms: lower is better", Unit: "ms"}
	for _, x := range cells {
		p := chart.Panel{
			Title: fmt.Sprintf("%s, %d workers of %dK tokens, speed %.3g, sessions: %s", x.trace.Name, x.workers, x.kv/1000, x.speed, x.sessions),
		}
		for _, name := range o.names() {
			if r := x.policies[name]; r != nil {
				p.Bars = append(p.Bars, chart.Bar{
					Name: name, Caption: fmt.Sprintf("%.4g, %.2f×", r.MeanTTFT, r.Relative.MeanTTFT), Value: r.MeanTTFT, Own: name == ownPolicy,
				})
			}
		}
		c.Panels = append(c.Panels, p)
	}
	return c.Draw(w)
}

// drawMeans draws the geometric means of the mean TTFT over all cells, the lowest first. A picture of
// each cell of a suite could not be read.
func (o *options) drawMeans(w io.Writer, totals []*total) error {
	totals = slices.Clone(totals)
	slices.SortStableFunc(totals, func(a, b *total) int { return cmp.Compare(a.meanTTFT, b.meanTTFT) })
	c := chart.Chart{
		Title:  fmt.Sprintf("Mean time to the first token relative to %s: lower is better", o.policies[0]),
		Panels: make([]chart.Panel, 1),
	}
	for _, t := range totals {
		c.Panels[0].Bars = append(c.Panels[0].Bars, chart.Bar{
			Name: t.policy, Caption: fmt.Sprintf("%.2f", t.meanTTFT), Value: t.meanTTFT, Own: t.policy == ownPolicy,
		})
	}
	return c.Draw(w)
}
