// Command live checks tests/replay against the router as it serves traffic. It sends a
// slice of each trace through a real Caddy with kv_router to simulated engines, in real
// time. It then replays the same slice in virtual time. It does not test kv_router's
// features.
//
//	go run ./tests/live -traces DIR -policy predicted_latency,dynamo,round_robin
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

func main() {
	debug.SetGCPercent(400) // bodies are long, and processors few
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "live:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing to do any more
	}
}

// run does all that the command does.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	paths, err := o.paths()
	if err != nil {
		return err
	}
	var reports []*report
	for _, path := range paths {
		t, err := trace.ReadFile(path)
		if err != nil {
			return err
		}
		r, err := o.play(ctx, t, stderr)
		if err != nil {
			return fmt.Errorf("%s: %w", t.Name, err)
		}
		reports = append(reports, r)
		if o.json {
			continue
		}
		if err := r.write(stdout, !o.virtual); err != nil {
			return err
		}
		fmt.Fprintln(stdout)
	}
	if !o.json {
		return nil
	}
	e := json.NewEncoder(stdout)
	e.SetIndent("", "  ")
	return e.Encode(reports)
}

// play replays one slice of a trace with all policies.
func (o *options) play(ctx context.Context, t *trace.Trace, stderr io.Writer) (*report, error) {
	s := o.setup(t.Name)
	c := &cell{workers: o.workers, kvTokens: s.kv, speed: o.speed, scale: s.scale, warmUp: s.warmUp, keys: o.sessions == "key", seeds: o.seeds}
	if c.speed == 0 {
		fmt.Fprintf(stderr, "%s: looking for the saturation of %s\n", t.Name, o.saturate)
		saturation, err := sim.Saturation(sim.Config{Trace: t, Policy: o.saturate, Cluster: c.cluster(), Seed: o.seeds[0]})
		if err != nil {
			return nil, err
		}
		c.speed = o.load * saturation
	}
	stretch := func(d time.Duration) time.Duration { return time.Duration(float64(d) * c.speed) }
	var err error
	if c.slice, err = cut(t, stretch(s.warmUp+s.slice/2), stretch(s.slice/2)); err != nil {
		return nil, err
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	r := &report{
		Trace: t.Name, Requests: len(c.slice.Requests), Workers: c.workers, KVTokens: c.kvTokens,
		Speed: c.speed, Scale: c.scale, WarmUp: s.warmUp.Seconds(), Slice: s.slice.Seconds(),
	}
	for _, policy := range o.policies {
		res := &result{Policy: policy}
		r.Results = append(r.Results, res)
		if err := c.replay(res); err != nil {
			return nil, err
		}
		if o.virtual {
			continue
		}
		told := func() func(int) { return progress(stderr, t.Name, policy, len(c.slice.Requests)) }
		if err := c.live(ctx, res, o.runs, told); err != nil {
			return nil, fmt.Errorf("%s: %w", policy, err)
		}
	}
	r.compare(!o.virtual)
	return r, nil
}

// progress returns a function that tells how many requests are answered, ten times.
func progress(w io.Writer, name, policy string, all int) func(int) {
	told := 0
	return func(ended int) {
		if tenths := 10 * ended / all; tenths > told {
			told = tenths
			fmt.Fprintf(w, "%s %s: %d of %d requests\n", strings.TrimSpace(name), policy, ended, all)
		}
	}
}
