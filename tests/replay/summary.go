package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
)

// total is one policy over the cells that it has.
type total struct {
	policy string
	cells  int
	// meanTTFT, p99TTFT and hitRatio are geometric means of the ratios to the base.
	// Cells without hits are left out of hitRatio.
	meanTTFT, p99TTFT, hitRatio float64
	// overBest is the geometric mean of the mean TTFT relative to the best published
	// rule of each cell, worst the highest of these ratios.
	overBest, worst float64
	worstCell       string
	// overPool is the lowest hit ratio relative to that of pool; 0 without pool.
	overPool     float64
	overPoolCell string
}

func (c *cell) String() string {
	return fmt.Sprintf("%s, %d workers of %d, %s, %s", c.trace.Name, c.workers, c.kv, c.load, c.sessions)
}

// compare relates the policies of a cell to the base, and finds the best published rules.
func (c *cell) compare(base string) {
	for name, r := range c.policies {
		policy, exact := strings.CutSuffix(name, exactly)
		policy, _, _ = strings.Cut(policy, several)
		r.Relative = r.Over(c.policies[base].Figures)
		k := sim.KindOf(policy)
		if !k.Published {
			continue
		}
		if !exact {
			c.best = c.better(c.best, name)
		}
		if c.policies[base+exactly] != nil && (exact || !k.Exact) {
			c.bestExact = c.better(c.bestExact, name)
		}
	}
}

// better returns the policy with the lower mean TTFT, of equal ones the first by name.
func (c *cell) better(a, b string) string {
	if a == "" {
		return b
	}
	x, y := c.policies[a].MeanTTFT, c.policies[b].MeanTTFT
	if x < y || x == y && a < b {
		return a
	}
	return b
}

// over returns the mean TTFT of a policy relative to that of the best published rule; 0 without either.
func (c *cell) over(policy string) float64 {
	r, best := c.policies[policy], c.policies[c.best]
	if r == nil || best == nil {
		return 0
	}
	return r.MeanTTFT / best.MeanTTFT
}

func addUp(name string, cells []*cell) *total {
	t := &total{policy: name}
	var mean, p99, hits, best []float64
	for _, c := range cells {
		r := c.policies[name]
		if r == nil {
			continue
		}
		t.cells++
		mean, p99 = append(mean, r.Relative.MeanTTFT), append(p99, r.Relative.P99TTFT)
		if r.Relative.HitRatio > 0 {
			hits = append(hits, r.Relative.HitRatio)
		}
		if over := c.over(name); over > 0 {
			best = append(best, over)
			if over > t.worst {
				t.worst, t.worstCell = over, c.String()
			}
		}
		if pool := c.policies["pool"]; pool != nil && pool.HitRatio > 0 {
			if over := r.HitRatio / pool.HitRatio; t.overPoolCell == "" || over < t.overPool {
				t.overPool, t.overPoolCell = over, c.String()
			}
		}
	}
	t.meanTTFT, t.p99TTFT, t.hitRatio, t.overBest = sim.Geomean(mean), sim.Geomean(p99), sim.Geomean(hits), sim.Geomean(best)
	return t
}

// names returns the names of all rows' policies, in order.
func (o *options) names() []string {
	names := slices.Clone(o.policies)
	for _, p := range o.policies {
		names = append(names, p+exactly)
		for _, n := range o.routers {
			for _, v := range o.several(p, false, n) {
				names = append(names, v.name())
			}
		}
	}
	return names
}

// totals returns the sums of the policies that any cell has.
func (o *options) totals(cells []*cell) (totals []*total) {
	for _, name := range o.names() {
		if t := addUp(name, cells); t.cells > 0 {
			totals = append(totals, t)
		}
	}
	return totals
}

// write writes one row per cell for mean TTFT, p99 and hit ratio each, and the sums. In the suite,
// the cells come first in which predicted_latency is worst.
func (o *options) write(w io.Writer, cells []*cell) error {
	if o.suite {
		slices.SortStableFunc(cells, func(a, b *cell) int { return cmp.Compare(b.over("predicted_latency"), a.over("predicted_latency")) })
	}
	totals := o.totals(cells)
	fmt.Fprintf(w, "engine %s, seeds %s, all figures relative to %s\n", o.cluster.Engine.Name, strings.Trim(strings.ReplaceAll(fmt.Sprint(o.seeds), " ", ","), "[]"), o.policies[0])
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range []struct {
		title string
		of    func(*sim.Figures) float64
	}{
		{"mean TTFT", func(f *sim.Figures) float64 { return f.MeanTTFT }},
		{"p99 TTFT", func(f *sim.Figures) float64 { return f.P99TTFT }},
		{"hit ratio", func(f *sim.Figures) float64 { return f.HitRatio }},
	} {
		fmt.Fprintf(tw, "\n%s\ntrace\tworkers\tload\tspeed\tsessions\tbase", f.title)
		for _, t := range totals {
			fmt.Fprintf(tw, "\t%s", t.policy)
		}
		fmt.Fprintln(tw, "\tbest published")
		for _, c := range cells {
			fmt.Fprintf(tw, "%s\t%d of %dK\t%s\t%.3g\t%s\t%.4g", c.trace.Name, c.workers, c.kv/1000, c.load, c.speed, c.sessions, f.of(&c.policies[o.policies[0]].Figures))
			for _, t := range totals {
				if r := c.policies[t.policy]; r != nil {
					fmt.Fprintf(tw, "\t%.3f", f.of(r.Relative))
				} else {
					fmt.Fprint(tw, "\t-")
				}
			}
			best := c.best
			if c.bestExact != "" {
				best += ", " + c.bestExact
			}
			fmt.Fprintf(tw, "\t%s\n", best)
		}
	}
	fmt.Fprintln(tw, "\ngeometric means over the cells")
	fmt.Fprintln(tw, "policy\tcells\tTTFT mean\tp99\thit ratio\tTTFT over best published\tworst\tin\tlowest hit ratio over pool\tin")
	for _, t := range totals {
		fmt.Fprintf(tw, "%s\t%d\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%s\t%.3f\t%s\n",
			t.policy, t.cells, t.meanTTFT, t.p99TTFT, t.hitRatio, t.overBest, t.worst, t.worstCell, t.overPool, t.overPoolCell)
	}
	return tw.Flush()
}
