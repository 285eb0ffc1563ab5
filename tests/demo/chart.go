package main

import (
	"fmt"
	"io"

	"github.com/caddy-kvrouter/kvrouter/tests/chart"
)

// draw draws the mean times to first token as an SVG file.
func (r *result) draw(w io.Writer) error {
	c := chart.Chart{
		Title: "Mean time to first token in seconds: lower is better", Unit: "s",
		Notes: []string{
			fmt.Sprintf("Bar: median of %d seeds; line: least to most. The router and the machine add %.2f s at most.",
				r.seeds, r.outside[len(r.outside)-1].time),
			fmt.Sprintf("%d engines: %s, simulated at %gx speed.", engineCount, hardware, r.speed),
		},
	}
	for _, cells := range r.cells {
		load := cells[0].runs[0].load
		p := chart.Panel{Title: load.title, About: load.about}
		for _, x := range cells {
			p.Bars = append(p.Bars, chart.Bar{
				Name: x.name, Caption: x.caption(), Value: x.mean.Median, Least: x.mean.Least, Most: x.mean.Most, Own: x.own,
			})
		}
		c.Panels = append(c.Panels, p)
	}
	return c.Draw(w)
}

// caption is what stands beside a bar.
func (c *cell) caption() string {
	switch load := c.runs[0].load; {
	case load.alone:
		return fmt.Sprintf("%s s, %.0f answers/min", digits(c.mean.Median), c.rate.Median)
	case load.deaths == 0:
		return fmt.Sprintf("%s s, %.0f %% cached", digits(c.mean.Median), c.hits.Median)
	}
	failed, broken, _, _ := c.casualties()
	return fmt.Sprintf("%s s, %d failed, %d broken", digits(c.mean.Median), failed, broken)
}
