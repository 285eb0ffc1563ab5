package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

const (
	floodAt   = 30 // seconds
	shareOver = 30 * time.Second
	bothWait  = 2 * time.Second // then the first tokens are those of requests that have waited
	target    = 2 * time.Second
	// sampled is how many of the refused requests are replayed again, each without its refusal.
	sampled = 50
)

// fairness replays what tenants and classes do to each other.
func (o *options) fairness(stdout, stderr io.Writer) error {
	tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	rate, err := o.saturating(func(rate float64) *synth.Tenants { return synth.NewTenants(rate, 200).Interactive() })
	if err != nil {
		return err
	}
	fmt.Fprintf(tw, "engine %s, %d workers of %dK\n", o.cluster.Engine.Name, o.cluster.Workers, o.cluster.KVTokens/1000)
	background := queue.Class{Name: "background", Background: true}
	for _, cell := range []struct {
		name   string
		replay func() error
	}{
		{"flood", func() error { return o.beside(tw, rate, &flood{load: 0.6, tenants: 1, prompts: 1000, tokens: 8192}) }},
		{"five floods, 8K", func() error { return o.beside(tw, rate, &flood{load: 0.3, tenants: 5, prompts: 200, tokens: 8192}) }},
		{"five floods, 1.5K", func() error { return o.beside(tw, rate, &flood{load: 0.3, tenants: 5, prompts: 1000, tokens: 1500}) }},
		{"class", func() error {
			return o.beside(tw, rate, &flood{load: 0.3, tenants: 100, prompts: 20, tokens: 1500, class: queue.Class{Name: "batch"}})
		}},
		{"background, 8K", func() error {
			return o.beside(tw, rate, &flood{load: 0.6, tenants: 1, prompts: 1000, tokens: 8192, class: background})
		}},
		{"background, 1.5K", func() error {
			return o.beside(tw, rate, &flood{load: 0.6, tenants: 1, prompts: 5000, tokens: 1500, class: background})
		}},
		{"weights, alike", func() error { return o.weights(tw, 2048, 2048) }},
		{"weights, 8K and 1K", func() error { return o.weights(tw, 8192, 1024) }},
		{"in time", func() error { return o.inTime(tw) }},
	} {
		if !o.match.MatchString(cell.name) {
			continue
		}
		fmt.Fprintf(tw, "\n%s", cell.name)
		if err := errors.Join(cell.replay(), tw.Flush()); err != nil {
			return err
		}
	}
	return nil
}

// saturating returns the rate, by second, that saturates the pool.
func (o *options) saturating(make func(rate float64) *synth.Tenants) (float64, error) {
	const nominal = 10
	s, err := sim.Saturation(o.fairConfig(make(nominal).Trace(), sim.Queue{}, 1))
	return nominal * s, err
}

func (o *options) fairConfig(t *trace.Trace, q sim.Queue, routers int) sim.Config {
	c := sim.Config{Trace: t, Policy: o.policies[0], Cluster: o.cluster, Speed: 1, Seed: o.seeds[0], Queue: q}
	c.Routers = sim.Routers{Number: routers, Share: routers > 1, Late: o.late[0]}
	return c
}

// eachRule replays a trace with each rule and number of routers, and calls row with the results.
func (o *options) eachRule(t *trace.Trace, row func(name string, r *sim.Result)) error {
	for i, q := range o.queues {
		for _, n := range o.routers {
			r, err := sim.Run(o.fairConfig(t, q, n))
			if err != nil {
				return err
			}
			row(fmt.Sprintf("%s, %d routers", o.queueNames[i], n), r)
		}
	}
	return nil
}

// flood is prompts of some tenants that come at one time, beside a load of others.
type flood struct {
	load                     float64 // of saturation
	tenants, prompts, tokens int     // prompts of each tenant
	class                    queue.Class
}

// beside replays interactive tenants beside a flood, and without.
func (o *options) beside(w io.Writer, rate float64, f *flood) error {
	needs := float64(f.tenants*f.prompts) * o.cluster.Engine.PrefillMS(0, f.tokens) / 1e3 / float64(o.cluster.Workers) / (1 - f.load)
	interactive := func() *synth.Tenants { return synth.NewTenants(f.load*rate, floodAt+1.5*needs).Interactive() }
	alone, both := interactive().Trace(), interactive()
	for i := range f.tenants {
		both.Flood(floodAt, f.prompts, f.tokens, synth.InteractiveTenants+i)
	}
	both.Class(synth.InteractiveTenants, f.class)
	without, err := sim.Run(o.fairConfig(alone, sim.Queue{}, 1))
	if err != nil {
		return err
	}
	t, until := both.Trace(), time.Duration((floodAt+needs)*float64(time.Second))
	ttft := func(t *trace.Trace, r *sim.Result) (mean, p99 float64) {
		var all []float64
		for i, x := range r.Outcomes {
			if t.Requests[i].Tenant < synth.InteractiveTenants && x.Arrived > floodAt*time.Second && x.Arrived < until {
				all = append(all, float64(x.First-x.Arrived)/1e6)
				mean += all[len(all)-1]
			}
		}
		slices.Sort(all)
		return mean / float64(len(all)), stats.Percentile(all, 0.99)
	}
	mean, p99 := ttft(alone, without)
	fmt.Fprintf(w, "\tTTFT of the others, ms\tof without\tp99\twork of the pool's time\tall over, s\nwithout\t%.4g\t1\t1\t0\t\n", mean)
	return o.eachRule(t, func(name string, r *sim.Result) {
		m, p := ttft(t, r)
		work, end := 0.0, time.Duration(0)
		for i, x := range r.Outcomes {
			if end = max(end, x.Ended); t.Requests[i].Tenant >= synth.InteractiveTenants && x.First < until {
				work += x.Work
			}
		}
		work /= float64(o.cluster.Workers) * (until.Seconds() - floodAt) * 1e3
		fmt.Fprintf(w, "%s\t%.4g\t%.2f\t%.2f\t%.3f\t%.1f\n", name, m, m/mean, p/p99, work, end.Seconds())
	})
}

// weights replays two tenants with weights 1 and 3 that always have requests waiting, with prompts of some tokens each.
func (o *options) weights(w io.Writer, first, second int) error {
	n := 80 * 8192 / first * o.cluster.Workers
	t := synth.NewTenants(1, 0).Flood(0, n, first, 0).Flood(0, 2*n*first/second, second, 1).Weights(1, 3).Trace()
	fmt.Fprintf(w, "\tservice of the second for its weight, over that of the first, in each %v\n", shareOver)
	return o.eachRule(t, func(name string, r *sim.Result) {
		var begun [2][]time.Duration
		for i, x := range r.Outcomes {
			by := t.Requests[i].Tenant
			begun[by] = append(begun[by], x.First)
		}
		until := time.Duration(math.MaxInt64)
		for _, all := range begun {
			slices.Sort(all)
			until = min(until, all[len(all)*9/10]) // then it soon has none in some router
		}
		fmt.Fprintf(w, "%s\t", name)
		for from := bothWait; from+shareOver <= until; from += shareOver {
			var work [2]float64
			for i, x := range r.Outcomes {
				if x.First >= from && x.First < from+shareOver {
					work[t.Requests[i].Tenant] += x.Work
				}
			}
			fmt.Fprintf(w, "%.3f ", work[1]/work[0]/3)
		}
		fmt.Fprintln(w)
	})
}

// inTime replays overloads where first tokens later than a target are worth nothing.
func (o *options) inTime(w io.Writer) error {
	batch := func(rate float64) *synth.Tenants { return synth.NewTenants(rate, 120).Batch() }
	rate, err := o.saturating(batch)
	if err != nil {
		return err
	}
	for _, load := range []float64{1.2, 1.5} {
		fmt.Fprintf(w, "\toverload %.1f: TTFT within %v\trefused\tof these in time if served\n", load, target)
		for i, q := range o.queues {
			for _, late := range []queue.Late{queue.Serve, queue.Refuse} {
				if late == queue.Refuse && !q.Hold {
					continue
				}
				t := batch(load*rate).Target(target, late).Trace()
				r, err := sim.Run(o.fairConfig(t, q, 1))
				if err != nil {
					return err
				}
				if i == 0 {
					best := sim.Oracle(r.Outcomes, target)
					fmt.Fprintf(w, "oracle\t%.3f\t%.3f\t\n", best, 1-best)
				}
				refused, in := 0, 0
				var list []int
				for n, x := range r.Outcomes {
					if x.Refused {
						refused, list = refused+1, append(list, n)
					} else if x.First-x.Arrived <= target {
						in++
					}
				}
				wrong, tried, all := 0, 0, float64(len(r.Outcomes))
				for k := 0; k < len(list); k += 1 + len(list)/sampled {
					c := o.fairConfig(t, q, 1)
					c.Served = list[k] + 1
					again, err := sim.Run(c)
					if err != nil {
						return err
					}
					if x := again.Outcomes[list[k]]; x.First-x.Arrived <= target {
						wrong++
					}
					tried++
				}
				fmt.Fprintf(w, "%s, %s\t%.3f\t%.3f\t%.3f\n", o.queueNames[i], [...]string{"serve", "refuse"}[late], float64(in)/all, float64(refused)/all, float64(wrong)/float64(max(1, tried)))
			}
		}
	}
	return nil
}
