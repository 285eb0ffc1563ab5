package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
)

// hindsightMatch are the cells without -match.
const hindsightMatch = "^(prompt_4k|hundred_prompts|chats|mix|bursts), 4 x 60K, poisson, (middle|high)$"

// hindsightRequests is how many requests are placed anew, and count. They are in the middle of the
// trace, which ends behind them. If all begin at once, they are the first ones.
const hindsightRequests = 200

// hindsightRounds is how often each search begins anew, from the best places that any has found.
const hindsightRounds = 2

// hindsights are what the places are chosen for.
var hindsights = [3]struct {
	name string
	of   func(*sim.Figures) float64
}{
	{"TTFT", func(f *sim.Figures) float64 { return f.MeanTTFT }},
	{"end", func(f *sim.Figures) float64 { return f.MeanE2E }},
	{"both", func(f *sim.Figures) float64 { return f.MeanTTFT * f.MeanE2E }},
}

// inHindsight compares with the best places that are found. The searches begin with those of the
// best policy.
func (o *options) inHindsight(stdout, stderr io.Writer) error {
	o.seeds = o.seeds[:1]
	points, err := o.points(stderr)
	if err != nil {
		return err
	}
	for _, p := range points {
		p.cut()
	}
	if err = o.replayPoints(points, stderr); err != nil {
		return err
	}
	n := len(hindsights)
	found := make([]*sim.Result, len(points)*n)
	for range hindsightRounds {
		last := slices.Clone(found)
		err = each(len(found), "searches", stderr, func(i int) (err error) {
			p, h := points[i/n], hindsights[i%n]
			c, from := o.config(p, gridBase, o.seeds[0]), slices.Concat(p.results, last[i/n*n:i/n*n+n])
			c.Places = from[lowest(from, h.of)].Places
			found[i], err = sim.Hindsight(c, h.of, o.tries)
			return err
		})
		if err != nil {
			return err
		}
	}
	tw := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "cell\tTTFT ms\t%s\tbest rule\t\tend ms\t%[1]s\tbest rule\t\tend of TTFT's\tTTFT of end's\tboth: TTFT\tend\n", o.policies[0])
	for i, p := range points {
		fmt.Fprint(tw, p)
		var best [3]*sim.Result
		for h := range best {
			best[h] = found[i*n+lowest(found[i*n:i*n+n], hindsights[h].of)]
		}
		over := func(r *sim.Result, h int) float64 {
			return hindsights[h].of(&r.Figures) / hindsights[h].of(&best[h].Figures)
		}
		for h := range 2 {
			k := 1 + lowest(p.results[1:], hindsights[h].of)
			fmt.Fprintf(tw, "\t%.4g\t%.2f\t%.2f\t%s", hindsights[h].of(&best[h].Figures), over(p.results[0], h), over(p.results[k], h), o.policies[k])
		}
		fmt.Fprintf(tw, "\t%.2f\t%.2f\t%.2f\t%.2f\n", over(best[0], 1), over(best[1], 0), over(best[2], 0), over(best[2], 1))
	}
	return tw.Flush()
}

// cut ends the trace of a point behind the requests that are placed anew.
func (p *point) cut() {
	arrivals, t := p.trace.Arrivals(), *p.trace
	order := slices.Sorted(slices.Values(arrivals))
	from := max(0, (len(order)-hindsightRequests)/2)
	if t.AtOnce {
		from = 0
	}
	first, last := order[from], order[min(from+hindsightRequests, len(order))-1]
	t.Requests = nil
	for n, at := range arrivals {
		if at <= last {
			t.Requests = append(t.Requests, p.trace.Requests[n])
			p.counted = append(p.counted, at >= first)
		}
	}
	p.trace = &t
}

// lowest returns the position of the result with the lowest figure. Some may be nil.
func lowest(results []*sim.Result, of func(*sim.Figures) float64) (at int) {
	least := math.Inf(1)
	for i, r := range results {
		if r != nil && of(&r.Figures) < least {
			at, least = i, of(&r.Figures)
		}
	}
	return at
}
