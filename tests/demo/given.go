package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// patient bounds a run before given engines, in real time.
const patient = 10 * time.Minute

// beforeGiven are the contenders that are compared before given engines.
var beforeGiven = []string{"round_robin", "kv_router, no ids"}

// playGiven plays before engines that run already, one run after another, and prints
// a line for each contender. It returns what is in these lines.
func (o *options) playGiven(ctx context.Context, list []shape, out, progress io.Writer) (cells []*cell, err error) {
	fmt.Fprintf(out, "%d engines that run already. Median (least-most) of seeds %d to %d.\n",
		len(o.given), o.seed, o.seed+uint64(o.seeds)-1) //nolint:gosec // it is small
	for _, s := range list {
		if s.deaths > 0 || s.slow {
			continue
		}
		s.sessions = max(1, s.sessions*len(o.given)/engineCount)
		s.shared = s.shared * len(o.given) / engineCount
		fmt.Fprintf(out, "\n%-*s %17s %17s %17s  %s\n", nameWidth+2, s.title, "hit %", "mean TTFT s", "p99 TTFT s", "prompt tokens")
		for _, c := range contenders {
			if !slices.Contains(beforeGiven, c.name) {
				continue
			}
			var runs []*run
			for _, w := range o.workloads(s) {
				r := &run{contender: c, load: w, model: o.model}
				if err := o.before(ctx, r, progress); err != nil {
					return cells, err
				}
				runs = append(runs, r)
			}
			c := newCell(runs)
			c.given(out)
			cells = append(cells, c)
		}
	}
	return cells, nil
}

// before plays a run before given engines. Its system prompt begins with words of its
// own, so what earlier runs left in the caches does not help it.
func (o *options) before(ctx context.Context, r *run, progress io.Writer) error {
	a, err := newArena(r)
	if err != nil {
		return err
	}
	defer a.stop()
	addr, err := canned.FreeAddr()
	if err != nil {
		return err
	}
	r.addrs = []string{addr}
	own := fmt.Sprintf("%016x", rand.Uint64()) //nolint:gosec // not a secret
	r.load.prompt = own + " " + r.load.prompt
	if err := a.Load(quiet, fmt.Sprintf("http://%s {\n\t%s\n}\n", addr, r.route(o.given, own, o.speed))); err != nil {
		return err
	}
	if err := a.perform(ctx, patient, o.speed, progress); err != nil {
		return err
	}
	if len(r.samples) == 0 {
		return fmt.Errorf("%s: no request was answered; do the engines serve %q?", r.name, r.model)
	}
	return nil
}

// given writes the line of a contender before given engines.
func (c *cell) given(w io.Writer) {
	tokens := 0
	for _, r := range c.runs {
		for _, s := range r.samples {
			tokens += s.prompt
		}
	}
	fmt.Fprintf(w, "  %-*s %17s %17s %17s  %d\n", nameWidth, c.name, times(c.hits), times(c.mean), times(c.p99), tokens)
	if c.answered < c.asked {
		fmt.Fprintf(w, "  %d of %d requests were not answered.\n", c.asked-c.answered, c.asked)
	}
}
