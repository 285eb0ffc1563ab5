package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/chart"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// draw writes the chart that is asked for.
func (o *options) draw(chart func(io.Writer) error) error {
	if o.svg == "" {
		return nil
	}
	f, err := os.Create(o.svg) //nolint:gosec // the user names it
	if err != nil {
		return err
	}
	return errors.Join(chart(f), f.Close())
}

// drawResults draws the curves over time, or else mean and p99 TTFT at each speed.
func (o *options) drawResults(w io.Writer, t *trace.Trace, results []*sim.Result) error {
	title := fmt.Sprintf("%s, %s", t.Name, describe(&o.cluster))
	if o.buckets == 0 {
		var groups []chart.Group
		for same := range slices.Chunk(results, len(o.policies)) {
			mean := chart.Group{Lines: []string{"mean TTFT", fmt.Sprintf("speed %.3g", same[0].Speed)}}
			p99 := chart.Group{Lines: []string{"p99 TTFT", mean.Lines[1]}}
			for _, r := range same {
				mean.Values = append(mean.Values, r.Relative.MeanTTFT)
				p99.Values = append(p99.Values, r.Relative.P99TTFT)
			}
			groups = append(groups, mean, p99)
		}
		return chart.Bars(w, title, o.policies, groups)
	}
	var panels []chart.Panel
	for same := range slices.Chunk(results, len(o.policies)) {
		speed := fmt.Sprintf("at speed %.3g, ms", same[0].Speed)
		mean, p50 := chart.Panel{Name: "mean TTFT " + speed}, chart.Panel{Name: "p50 TTFT " + speed}
		for _, r := range same {
			var a, b []chart.Point
			for _, q := range r.Buckets {
				a, b = append(a, chart.Point{X: q.Seconds, Y: q.MeanTTFT}), append(b, chart.Point{X: q.Seconds, Y: q.P50TTFT})
			}
			mean.Lines, p50.Lines = append(mean.Lines, a), append(p50.Lines, b)
		}
		panels = append(panels, mean, p50)
	}
	return chart.Lines(w, title, o.policies, panels)
}

// drawSuite draws the mean TTFT of each cell.
func (o *options) drawSuite(w io.Writer, s *summary) error {
	names := make([]string, 0, len(s.Policies))
	for _, t := range s.Policies {
		names = append(names, t.Policy)
	}
	groups := make([]chart.Group, 0, len(s.Cells))
	for _, c := range s.Cells {
		g := chart.Group{Lines: []string{c.Trace, fmt.Sprintf("%d of %dK", c.Workers, c.KVTokens/1000), c.Load + ", keys: " + c.Sessions}}
		for _, name := range names {
			v := 0.0
			if r := c.Policies[name]; r != nil {
				v = r.Relative.MeanTTFT
			}
			g.Values = append(g.Values, v)
		}
		groups = append(groups, g)
	}
	return chart.Bars(w, "mean TTFT, engine "+o.cluster.Engine.Name, names, groups)
}
