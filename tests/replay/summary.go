package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
)

// summary is what the suite shows of each policy over all cells.
type summary struct {
	Cells    []*suiteCell
	Policies []*total
}

// total is one policy over the cells that it has.
type total struct {
	Policy string
	// Cells is how many cells it has.
	Cells int
	// MeanTTFT, P99TTFT and HitRatio are geometric means of the ratios to the base.
	// Cells without hits are left out of HitRatio.
	MeanTTFT float64
	P99TTFT  float64
	HitRatio float64
	// OverBest is the geometric mean of the mean TTFT relative to the best published
	// rule of each cell, Worst the highest of these ratios.
	OverBest  float64
	Worst     float64
	WorstCell string
	// OverPool is the lowest hit ratio relative to that of pool; 0 without pool.
	OverPool     float64
	OverPoolCell string
}

func (c *suiteCell) String() string {
	return fmt.Sprintf("%s, %d workers of %d, %s, %s", c.Trace, c.Workers, c.KVTokens, c.Load, c.Sessions)
}

// summarise compares each cell's policies, and adds the cells up.
func (o *options) summarise(cells []*suiteCell) *summary {
	for _, c := range cells {
		c.compare(o.policies[0])
	}
	s := &summary{Cells: cells}
	for _, name := range o.names() {
		if t := addUp(name, cells); t.Cells > 0 {
			s.Policies = append(s.Policies, t)
		}
	}
	return s
}

// names lists the policies as the cells name them, exact knowledge last.
func (o *options) names() []string {
	names := slices.Clone(o.policies)
	for _, p := range o.policies {
		names = append(names, p+exactly)
	}
	return names
}

// compare relates the policies of a cell to the base and to the best published rules.
func (c *suiteCell) compare(base string) {
	for name, r := range c.Policies {
		policy, exact := strings.CutSuffix(name, exactly)
		r.Relative = r.Over(c.Policies[base].Figures)
		k, _ := sim.KindOf(policy)
		if !k.Published {
			continue
		}
		if !exact {
			c.Best = c.better(c.Best, name)
		}
		if exact || !k.Exact {
			c.BestExact = c.better(c.BestExact, name)
		}
	}
	c.OverBest = c.over(c.Best)
	if both := c.Policies[base+exactly] != nil; both {
		c.OverBestExact = c.over(c.BestExact)
	} else {
		c.BestExact = ""
	}
}

// better returns the policy with the lower mean TTFT, of equal ones the first by name.
func (c *suiteCell) better(a, b string) string {
	if a == "" {
		return b
	}
	x, y := c.Policies[a].MeanTTFT, c.Policies[b].MeanTTFT
	if x < y || x == y && a < b {
		return a
	}
	return b
}

func (c *suiteCell) over(best string) map[string]float64 {
	ratios := make(map[string]float64)
	if r := c.Policies[best]; r != nil {
		for name, other := range c.Policies {
			ratios[name] = other.MeanTTFT / r.MeanTTFT
		}
	}
	return ratios
}

func addUp(name string, cells []*suiteCell) *total {
	t := &total{Policy: name, OverPool: math.Inf(1)}
	var mean, p99, hits, best []float64
	for _, c := range cells {
		r := c.Policies[name]
		if r == nil {
			continue
		}
		t.Cells++
		mean, p99 = append(mean, r.Relative.MeanTTFT), append(p99, r.Relative.P99TTFT)
		if r.Relative.HitRatio > 0 {
			hits = append(hits, r.Relative.HitRatio)
		}
		if over, ok := c.OverBest[name]; ok {
			best = append(best, over)
			if over > t.Worst {
				t.Worst, t.WorstCell = over, c.String()
			}
		}
		if pool := c.Policies["pool"]; pool != nil && pool.HitRatio > 0 && r.HitRatio/pool.HitRatio < t.OverPool {
			t.OverPool, t.OverPoolCell = r.HitRatio/pool.HitRatio, c.String()
		}
	}
	if math.IsInf(t.OverPool, 1) {
		t.OverPool = 0
	}
	t.MeanTTFT, t.P99TTFT, t.HitRatio, t.OverBest = geomean(mean), geomean(p99), geomean(hits), geomean(best)
	return t
}

func geomean(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	return sim.Geomean(len(values), func(i int) float64 { return values[i] })
}

// writeSuite writes one row per cell for mean TTFT, p99 and hit ratio each, and
// the summary.
func writeSuite(w io.Writer, o *options, s *summary) error {
	fmt.Fprintf(w, "engine %s, seeds %s, all figures relative to %s", o.cluster.Engine.Name, commas(o.seeds), o.policies[0])
	fmt.Fprintln(w)
	names := make([]string, 0, len(s.Policies))
	for _, t := range s.Policies {
		names = append(names, t.Policy)
	}
	for _, f := range []struct {
		title string
		of    func(*sim.Figures) float64
	}{
		{"mean TTFT", func(f *sim.Figures) float64 { return f.MeanTTFT }},
		{"p99 TTFT", func(f *sim.Figures) float64 { return f.P99TTFT }},
		{"hit ratio", func(f *sim.Figures) float64 { return f.HitRatio }},
	} {
		fmt.Fprintf(w, "\n%s\n", f.title)
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(tw, "trace\tworkers\tload\tspeed\tsessions\tbase\t%s\tbest published\n", strings.Join(names, "\t"))
		for _, c := range s.Cells {
			fmt.Fprintf(tw, "%s\t%d of %dK\t%s\t%.3g\t%s\t%.4g", c.Trace, c.Workers, c.KVTokens/1000, c.Load, c.Speed, c.Sessions, f.of(&c.Policies[o.policies[0]].Figures))
			for _, name := range names {
				if r := c.Policies[name]; r != nil {
					fmt.Fprintf(tw, "\t%.3f", f.of(r.Relative))
				} else {
					fmt.Fprint(tw, "\t-")
				}
			}
			best := c.Best
			if c.OverBestExact != nil {
				best += ", " + c.BestExact
			}
			fmt.Fprintf(tw, "\t%s\n", best)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	return writeTotals(w, s)
}

func writeTotals(w io.Writer, s *summary) error {
	fmt.Fprintln(w, "\ngeometric means over the cells")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "policy\tcells\tTTFT mean\tp99\thit ratio\tTTFT over best published\tworst\tin\tlowest hit ratio over pool\tin")
	for _, t := range s.Policies {
		fmt.Fprintf(tw, "%s\t%d\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%s\t%.3f\t%s\n",
			t.Policy, t.Cells, t.MeanTTFT, t.P99TTFT, t.HitRatio, t.OverBest, t.Worst, t.WorstCell, t.OverPool, t.OverPoolCell)
	}
	return tw.Flush()
}
