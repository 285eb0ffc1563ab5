package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// The axes of the grid.
var (
	gridWorkers = []int{2, 4, 8, 32}
	gridKV      = []int64{60_000, 500_000}
	gridPools   = []pool{{"", sim.Cluster{}}, {"mixed", sim.Cluster{Mixed: 3}}, {"slow", sim.Cluster{Slow: sim.Slow{Factor: 3, To: 1}}}}
)

// pool is a kind of pool.
type pool struct {
	name    string
	cluster sim.Cluster
}

// uneven are the classes that are also replayed on pools whose engines differ.
var uneven = []string{"prompt_4k", "hundred_prompts", "chats", "mix", "batch"}

// gridRivals are the policies that the first one is compared with.
var gridRivals = []string{
	"predicted_latency", "round_robin", "least_load", "dynamo", "dynamo_16", "dynamo_32", "lmetric", "min_ttft", "smetric", "cache_aware", "gaie",
}

// gridBase is the policy whose saturation the loads of the grid are shares of.
const gridBase = "lmetric"

// point is a cell of the grid.
type point struct {
	class   string
	workers int
	kv      int64
	atOnce  bool
	pool    pool
	load    string
	speed   float64
	trace   *trace.Trace
	counted []bool        // requests; nil: all after the warm-up
	results []*sim.Result // of each policy
}

func (p *point) String() string {
	arrivals := "poisson"
	if p.atOnce {
		arrivals = "at once"
	}
	name := fmt.Sprintf("%s, %d x %dK, %s, %s", p.class, p.workers, p.kv/1000, arrivals, p.load)
	if p.pool.name != "" {
		name += ", " + p.pool.name
	}
	return name
}

// isQuick tells whether a place is one of the few that -quick replays: those in which a change of
// the cost has shown most.
func (p *point) isQuick() bool {
	if p.workers != 4 || p.kv != gridKV[0] {
		return false
	}
	switch p.class {
	case "prompt_4k", "prompt_16k", "hundred_prompts", "chats":
		return p.pool.name == "" || p.pool.name == "slow"
	case "batch", "reasoning":
		return p.pool.name == "" && !p.atOnce
	}
	return false
}

// points lists the cells.
func (o *options) points(stderr io.Writer) (points []*point, err error) {
	var places []*point
	for _, class := range synth.Classes() {
		for _, pool := range gridPools {
			if pool.name != "" && !slices.Contains(uneven, class) {
				continue
			}
			for _, workers := range gridWorkers {
				if pool.name != "" && workers != 4 && workers != 8 {
					continue
				}
				for _, kv := range gridKV {
					for _, atOnce := range []bool{false, true} {
						if atOnce && class == "bursts" {
							continue // as batch
						}
						p := &point{class: class, workers: workers, kv: kv, atOnce: atOnce, pool: pool}
						if len(o.at(p)) > 0 && (!o.quick || p.isQuick()) {
							places = append(places, p)
						}
					}
				}
			}
		}
	}
	err = each(len(places), "saturations of "+gridBase, stderr, func(i int) (err error) {
		p := places[i]
		if p.trace, err = synth.MakeClass(p.class, p.workers, p.atOnce, 1); err == nil {
			p.speed, err = sim.Saturation(o.config(p, gridBase, o.seeds[0]))
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", p, err)
		}
		return err
	})
	for _, p := range places {
		points = append(points, o.at(p)...)
	}
	return points, err
}

// at returns the cells of a place that are wanted.
func (o *options) at(p *point) (points []*point) {
	for _, l := range loads {
		at := *p
		at.load, at.speed = l.name, l.share*p.speed
		if o.match.MatchString(at.String()) {
			points = append(points, &at)
		}
	}
	return points
}

// exact tells whether a policy has exact knowledge.
func (o *options) exact(policy string) bool {
	return sim.KindOf(policy).Exact && (o.knowledge == "exact" || o.knowledge == "learned")
}

// draw reads a policy as -policy names it: "name@1" is the same policy with another seed.
func draw(policy string) (name string, seed uint64, err error) {
	name, other, found := strings.Cut(policy, "@")
	if found {
		seed, err = strconv.ParseUint(other, 10, 32)
	}
	return name, seed, err
}

// config returns the replay of a point.
func (o *options) config(p *point, policy string, seed uint64) sim.Config {
	policy, more, _ := draw(policy) // parse has seen to errors
	seed += more
	c := sim.Config{Trace: p.trace, Policy: policy, Cluster: p.pool.cluster, Speed: p.speed, Seed: seed, Counted: p.counted}
	c.Exact, c.Learned = o.exact(policy), o.knowledge == "learned"
	c.Sessions = o.sessions == "key" && !sim.KindOf(policy).Published
	if n := o.routers[0]; n > 1 && !sim.KindOf(policy).Published {
		c.Routers = sim.Routers{Number: n, Share: o.share[0] == "journal", Late: o.late[0]}
	}
	c.Workers, c.KVTokens, c.Engine, c.ToldTimes = p.workers, p.kv, o.cluster.Engine, 1
	return c
}

// grid replays the grid.
func (o *options) grid(stdout, stderr io.Writer) error {
	points, err := o.points(stderr)
	if err != nil {
		return err
	}
	if err = o.replayPoints(points, stderr); err != nil {
		return err
	}
	return o.writeGrid(stdout, points)
}

// replayPoints replays all policies on each point.
func (o *options) replayPoints(points []*point, stderr io.Writer) error {
	runs := make([]sim.Config, 0, len(points)*len(o.policies)*len(o.seeds))
	for _, p := range points {
		for _, policy := range o.policies {
			for _, seed := range o.seeds {
				runs = append(runs, o.config(p, policy, seed))
			}
		}
	}
	results, err := replayAll(runs, stderr)
	if err != nil {
		return err
	}
	n := len(o.seeds)
	for i, p := range points {
		for k := range o.policies {
			at := (i*len(o.policies) + k) * n
			p.results = append(p.results, sim.Mean(results[at:at+n]))
		}
	}
	return nil
}

// quickWorst bounds the mean TTFT over the best rival in any cell of -quick. quickDominated bounds
// the number of cells in which a rival is better in mean TTFT and time to the end.
const quickWorst, quickDominated = 1.5, 2

// gridMetrics are compared with the best rival of a cell; allowed is by what factor the first
// policy may be above it.
var gridMetrics = []struct {
	name    string
	allowed float64
	of      func(*sim.Figures) float64
}{
	{"TTFT", 1.05, func(f *sim.Figures) float64 { return f.MeanTTFT }},
	{"p99", 1.10, func(f *sim.Figures) float64 { return f.P99TTFT }},
	{"end", 1.05, func(f *sim.Figures) float64 { return f.MeanE2E }},
}

// judged is what a cell says of the first policy.
type judged struct {
	*point
	over      [3]float64 // the best rival, for each metric
	rival     [3]string
	dominated string // a rival that is better by 2 % in mean TTFT and in time to the end
	excess    float64
}

func (o *options) judge(p *point) *judged {
	j := &judged{point: p}
	us := p.results[0].Figures
	for m, metric := range gridMetrics {
		best := math.Inf(1)
		for k := 1; k < len(p.results); k++ {
			if v := metric.of(&p.results[k].Figures); v < best {
				best, j.rival[m] = v, o.policies[k]
			}
		}
		j.over[m] = metric.of(&us) / best
		j.excess = max(j.excess, j.over[m]/metric.allowed)
	}
	for k := 1; k < len(p.results); k++ {
		f := p.results[k].Figures
		if f.MeanTTFT < 0.98*us.MeanTTFT && f.MeanE2E < 0.98*us.MeanE2E {
			j.dominated += " " + o.policies[k]
			j.excess = max(j.excess, us.MeanTTFT/f.MeanTTFT, us.MeanE2E/f.MeanE2E)
		}
	}
	return j
}

// writeGrid writes the sums and the cells, the worst first.
func (o *options) writeGrid(w io.Writer, points []*point) error {
	all := make([]*judged, 0, len(points))
	for _, p := range points {
		all = append(all, o.judge(p))
	}
	slices.SortFunc(all, func(a, b *judged) int { return cmp.Compare(b.excess, a.excess) })
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "policy\tTTFT over best rival\tp99\tend\tcells")
	for k := range o.policies {
		var over [3][]float64
		for _, j := range all {
			for m, metric := range gridMetrics {
				best := metric.of(&j.results[0].Figures) / j.over[m]
				over[m] = append(over[m], metric.of(&j.results[k].Figures)/best)
			}
		}
		fmt.Fprintf(tw, "%s\t%.3f\t%.3f\t%.3f\t%d\n", o.policies[k], sim.Geomean(over[0]), sim.Geomean(over[1]), sim.Geomean(over[2]), len(all))
	}
	failed, dominated := [3]int{}, 0
	for _, j := range all {
		for m := range gridMetrics {
			if j.over[m] > gridMetrics[m].allowed {
				failed[m]++
			}
		}
		if j.dominated != "" {
			dominated++
		}
	}
	fmt.Fprintf(tw, "\ndominated in %d cells; above the best rival by more than allowed: TTFT %d, p99 %d, end %d\n\n", dominated, failed[0], failed[1], failed[2])
	fmt.Fprintln(tw, "cell\tTTFT ms\tover\tbest\tp99 over\tbest\tend ms\tover\tbest\tgood\tdominated by")
	for _, j := range all {
		f := j.results[0].Figures
		fmt.Fprintf(tw, "%s\t%.4g\t%.3f\t%s\t%.3f\t%s\t%.4g\t%.3f\t%s\t%.2f\t%s\n", j, f.MeanTTFT, j.over[0], j.rival[0], j.over[1], j.rival[1], f.MeanE2E, j.over[2], j.rival[2], f.Good, j.dominated)
	}
	if err := tw.Flush(); err != nil || !o.quick {
		return err
	}
	for _, j := range all {
		if j.over[0] > quickWorst {
			return fmt.Errorf("%s: the mean TTFT is %.2f times that of %s", j, j.over[0], j.rival[0])
		}
	}
	if dominated > quickDominated {
		return fmt.Errorf("dominated in %d cells", dominated)
	}
	return nil
}
