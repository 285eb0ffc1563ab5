package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
)

// parseHold reads what is held: off, any, or with the steps of an engine that count as room, any:2.
func (o *options) parseHold(text string) error {
	rule, depth, _ := strings.Cut(text, ":")
	q := o.queue
	q.Hold, q.Depth = rule == "any", 2
	var err error
	if depth != "" {
		q.Depth, err = strconv.ParseFloat(depth, 64)
	}
	if err != nil || !q.Hold && rule != "off" {
		return fmt.Errorf("-hold has %q, want off, any, or any and steps behind a colon", text)
	}
	o.queues, o.queueNames = append(o.queues, q), append(o.queueNames, text)
	return nil
}

// holding compares what routers may hold, in cells of the grid and on the given traces. The first rule is
// what the others are compared with.
func (o *options) holding(stdout, stderr io.Writer) error {
	points, err := o.heldPoints(stderr)
	if err == nil && len(points) == 0 {
		err = errors.New("no cell matches")
	}
	if err != nil {
		return err
	}
	var runs []sim.Config
	for _, p := range points {
		for _, q := range o.queues {
			for _, seed := range o.seeds {
				c := o.config(p, o.policies[0], seed)
				c.Queue = q
				runs = append(runs, c)
			}
		}
	}
	next, err := o.replayMeans(runs, stderr)
	if err != nil {
		return err
	}
	tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(tw, "cell\tTTFT ms")
	for _, name := range o.queueNames[1:] {
		fmt.Fprintf(tw, "\t%s: TTFT\tp99\tp99.9\tend", name)
	}
	over := make([][]float64, 4*(len(o.queues)-1))
	for _, p := range points {
		base := next()
		fmt.Fprintf(tw, "\n%s\t%.4g", p, base.MeanTTFT)
		for k := range o.queues[1:] {
			f := next().Over(base.Figures)
			for m, v := range []float64{f.MeanTTFT, f.P99TTFT, f.P999TTFT, f.MeanE2E} {
				over[4*k+m] = append(over[4*k+m], v)
				fmt.Fprintf(tw, "\t%.2f", v)
			}
		}
	}
	fmt.Fprint(tw, "\ngeometric mean\t")
	for _, all := range over {
		fmt.Fprintf(tw, "\t%.2f", sim.Geomean(all))
	}
	fmt.Fprint(tw, "\nworst\t")
	for _, all := range over {
		fmt.Fprintf(tw, "\t%.2f", slices.Max(all))
	}
	fmt.Fprintln(tw)
	return tw.Flush()
}

// heldPoints returns the cells of the grid that -match names, and those of the traces.
func (o *options) heldPoints(stderr io.Writer) (points []*point, err error) {
	if o.isGrid {
		if points, err = o.points(stderr); err != nil {
			return nil, err
		}
	}
	if o.traces != "" {
		o.sessions = "none"
		cells, err := o.cells(stderr)
		if err != nil {
			return nil, err
		}
		for _, c := range cells {
			points = append(points, &point{class: c.trace.Name, workers: c.workers, kv: c.kv, load: fmt.Sprintf("speed %.3g", c.speed), speed: c.speed, trace: c.trace})
		}
	}
	for _, p := range points {
		p.trace = p.trace.Shared(o.tenants)
	}
	return points, nil
}
