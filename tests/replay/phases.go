package main

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
)

// rules are how requests are split; the last one is the default.
var rules = []kvscore.SplitRule{kvscore.SplitAlways, kvscore.SplitAuto}

// splits are the numbers of prefill workers of eight, and transfers the speeds between them and the others in GB/s.
var (
	splits    = []int{2, 3, 4}
	transfers = []float64{20, 100}
)

// phases replays each trace against whole workers, and against split ones with each rule.
func (o *options) phases(stdout, stderr io.Writer) error {
	cells, err := o.cells(stderr)
	if err != nil {
		return err
	}
	policy := o.policies[0]
	var runs []sim.Config
	add := func(c *cell, p sim.Split) {
		for _, seed := range o.seeds {
			k := sim.Config{Trace: c.trace, Policy: policy, Cluster: o.on(c.setup), Speed: c.speed, Seed: seed, Sessions: c.sessions == "key"}
			k.Split = p
			runs = append(runs, k)
		}
	}
	kept := cells[:0]
	for _, c := range cells {
		if c.workers != 8 {
			continue
		}
		kept = append(kept, c)
		add(c, sim.Split{})
		for _, n := range splits {
			for _, speed := range transfers {
				for _, rule := range rules {
					add(c, sim.Split{Prefill: n, GBs: speed, Phases: rule})
				}
			}
		}
	}
	next, err := o.replayMeans(runs, stderr)
	if err != nil {
		return err
	}
	tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "engine %s, %s; milliseconds of 8 whole workers, and by what the others multiply them\n", o.cluster.Engine.Name, policy)
	fmt.Fprint(tw, "trace\tload\tspeed\tsessions\tworkers\tGB/s")
	for _, f := range figures {
		fmt.Fprintf(tw, "\t%s", f.name)
		for _, r := range rules {
			fmt.Fprintf(tw, "\t%v", r)
		}
		fmt.Fprint(tw, "\tover best")
	}
	fmt.Fprintln(tw, "\tparted")
	above, both, all := make([]int, len(figures)), 0, 0
	for _, c := range kept {
		whole := next()
		for _, n := range splits {
			for _, speed := range transfers {
				list := make([]*sim.Result, len(rules))
				for i := range list {
					list[i] = next()
				}
				fmt.Fprintf(tw, "%s\t%s\t%.3g\t%s\t%d+%d\t%g", c.trace.Name, c.load, c.speed, c.sessions, n, 8-n, speed)
				over := make([]bool, len(figures))
				for i, f := range figures {
					if over[i] = columns(tw, whole, list, f.of) > most; over[i] {
						above[i]++
					}
				}
				fmt.Fprintf(tw, "\t%.2f\n", list[len(list)-1].Split)
				if all++; over[0] && over[1] {
					both++
				}
			}
		}
	}
	fmt.Fprintf(tw, "\n%v is above %g of the best rule in", rules[len(rules)-1], most)
	for i, f := range figures {
		fmt.Fprintf(tw, " %d by %s,", above[i], f.name)
	}
	fmt.Fprintf(tw, " %d by %s and %s, of %d cells\n", both, figures[0].name, figures[1].name, all)
	return tw.Flush()
}

// figures are what is compared.
var figures = []struct {
	name string
	of   func(*sim.Result) float64
}{
	{"TTFT", func(r *sim.Result) float64 { return r.MeanTTFT }},
	{"gap", func(r *sim.Result) float64 { return r.MeanGap }},
	{"end", func(r *sim.Result) float64 { return r.MeanE2E }},
}

// most is how far the router's own rule may be above the best one.
const most = 1.03

// columns writes one figure of all rules, and returns that of the last one over the best.
func columns(w io.Writer, whole *sim.Result, list []*sim.Result, of func(*sim.Result) float64) float64 {
	base, best := of(whole), math.Inf(1)
	fmt.Fprintf(w, "\t%.4g", base)
	for _, r := range list {
		v := of(r)
		best = min(best, v)
		fmt.Fprintf(w, "\t%.2f", v/base)
	}
	over := of(list[len(list)-1]) / best
	fmt.Fprintf(w, "\t%.3f", over)
	return over
}
