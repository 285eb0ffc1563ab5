// Command replay compares routing policies: it replays traces of requests against
// modelled engines in virtual time. The scheduler, its index, leases and
// policies are those that serve traffic; engines and published rules are models.
//
//	go run ./tests/replay -traces F -policy dynamo,predicted_latency -workers 8 -kv-tokens 200000 -speed 1,2
//	go run ./tests/replay -suite -traces DIR
//
// The first policy is what the others are compared with. See -help for the rest.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

// options are the command's flags.
type options struct {
	traces     string
	suite      bool
	isGrid     bool
	quick      bool
	match      *regexp.Regexp
	hindsight  bool
	tries      int
	split      bool
	fair       bool
	tenants    int
	queue      sim.Queue // what all of queues have
	queues     []sim.Queue
	queueNames []string
	policies   []string
	speeds     []float64
	seeds      []uint64
	cluster    sim.Cluster
	knowledge  string
	sessions   string
	spread     bool
	routers    []int
	share      []string
	late       []time.Duration
	picture    string
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := new(options)
	var policies, speeds, seeds, slow, model, routers, share, late, match, hold string
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.traces, "traces", "", "comma-separated `files` and directories of traces: JSON lines, plain or gzipped; synth is all generated ones, synth:name one of them: "+strings.Join(synth.Names(), ", "))
	f.BoolVar(&o.suite, "suite", false, "replay each trace with its own workers and at its own loads, in place of -workers, -kv-tokens and -speed")
	f.BoolVar(&o.isGrid, "grid", false, "replay the generated classes of traffic at all loads, on pools of many kinds")
	f.BoolVar(&o.quick, "quick", false, "with -grid, a few places, for a first look")
	f.BoolVar(&o.hindsight, "hindsight", false, "in cells of the grid, compare with the best places of the requests that are found once all is known")
	f.IntVar(&o.tries, "tries", 3000, "with -hindsight, how many `replays` one search makes; there are six in each cell")
	f.StringVar(&match, "match", "", "with -grid and -hindsight, only the cells whose name fits this regular `expression`; with -hindsight the default is "+hindsightMatch)
	f.BoolVar(&o.split, "phases", false, "replay against 8 whole workers, and against 2, 3 and 4 that prefill for the rest, with the first of -policy")
	f.StringVar(&hold, "hold", "", "compare comma-separated `rules` for what the router holds in its queue: off, any; any:2 counts two steps of an engine as room")
	f.BoolVar(&o.fair, "fair", false, "replay what tenants and classes do to each other, with each of -hold and -routers")
	f.IntVar(&o.tenants, "tenants", 1, "with -hold, how many `tenants` share the sessions")
	f.Float64Var(&o.queue.Step, "step", 4096, "with -hold, how many `tokens` an engine computes in a step, as the router assumes")
	f.Float64Var(&o.queue.Spare, "spare", 0.25, "with -fair, the `share` of the workers that background requests leave without a prefill")
	f.Float64Var(&o.queue.Wrong, "wrong", 1, "with -hold, what all predicted times are multiplied with")
	f.StringVar(&policies, "policy", strings.Join(suitePolicies, ","), "comma-separated `policies`; the first is compared with. There are "+strings.Join(sim.Policies(), ", "))
	f.StringVar(&speeds, "speed", "1", "comma-separated `factors` on the speed of the trace, think times included")
	f.StringVar(&model, "engine", engine.Default().Name, "the `model` of all engines: "+strings.Join(engine.Models(), ", "))
	f.IntVar(&o.cluster.Workers, "workers", 8, "the number of workers")
	f.Int64Var(&o.cluster.KVTokens, "kv-tokens", 200_000, "the KV capacity of each worker in `tokens`")
	f.BoolVar(&o.cluster.Preempt, "preempt", false, "the engines admit prompts without room for their answers, and preempt requests when there is none")
	f.Float64Var(&o.cluster.ToldTimes, "told-kv-tokens", 1, "how many `times` the right capacity the router is told")
	f.StringVar(&seeds, "seed", "1", "comma-separated `seeds` for what chance decides; the figures are the geometric means over them")
	f.StringVar(&o.knowledge, "knowledge", "approximate", "approximate; exact: each policy sees the engines' blocks in place of the router's mirror; learned: so it does, of text whose blocks it learns from late events; or both: approximate and exact")
	f.StringVar(&o.sessions, "sessions", "both", "none, key or both; key: each request names its session, and the router binds it to a worker")
	f.BoolVar(&o.spread, "spread", false, "spread requests that arrive at one time evenly up to the next arrival")
	f.StringVar(&routers, "routers", "1", "comma-separated `numbers` of routers that share the requests out by chance, for policies of the router")
	f.StringVar(&share, "share", "journal", "what several routers tell each other: none, journal, or both with a comma")
	f.StringVar(&late, "late", "10ms", "comma-separated `times` that this takes")
	f.StringVar(&slow, "slow", "", "`worker:factor[@from-to]`: what the step times of a worker (from 0) are multiplied with; from and to are shares of the trace's duration")
	f.StringVar(&o.picture, "svg", "", "the `file` for a picture of the mean times to the first token")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.traces == "" && !o.isGrid && !o.hindsight && !o.fair:
		return nil, errors.New("-traces is missing")
	case !slices.Contains([]string{"approximate", "exact", "learned", "both"}, o.knowledge):
		return nil, fmt.Errorf("-knowledge is %q, want approximate, exact, learned or both", o.knowledge)
	case o.sessions != "none" && o.sessions != "key" && o.sessions != "both":
		return nil, fmt.Errorf("-sessions is %q, want none, key or both", o.sessions)
	}
	if o.hindsight && match == "" {
		match = hindsightMatch
	}
	if hold != "" || o.fair {
		policies = "predicted_latency"
	}
	if (o.isGrid || o.hindsight) && policies == strings.Join(suitePolicies, ",") {
		policies = strings.Join(gridRivals, ",")
	}
	o.policies = strings.Split(policies, ",")
	for i, p := range o.policies {
		name, _, err := draw(p)
		if err != nil || !slices.Contains(sim.Policies(), name) || slices.Contains(o.policies[:i], p) {
			return nil, fmt.Errorf("-policy has %q, want different ones of %s", p, strings.Join(sim.Policies(), ", "))
		}
	}
	err := errors.Join(
		list(&o.speeds, "speed", speeds, func(v string) (float64, error) { return strconv.ParseFloat(v, 64) }),
		list(&o.seeds, "seed", seeds, func(v string) (uint64, error) { return strconv.ParseUint(v, 10, 64) }),
		list(&o.routers, "routers", routers, strconv.Atoi),
		list(&o.late, "late", late, time.ParseDuration),
	)
	o.share = strings.Split(share, ",")
	switch {
	case err != nil:
		return nil, err
	case slices.Min(o.routers) < 1:
		return nil, fmt.Errorf("-routers has %d, want numbers from 1 on", slices.Min(o.routers))
	case slices.ContainsFunc(o.share, func(what string) bool { return what != "none" && what != "journal" }):
		return nil, fmt.Errorf("-share is %q, want none, journal or both", share)
	}
	if hold == "" && o.fair {
		hold = "off,any"
	}
	for rule := range strings.SplitSeq(hold, ",") {
		if hold != "" {
			if err := o.parseHold(rule); err != nil {
				return nil, err
			}
		}
	}
	if o.match, err = regexp.Compile(match); err != nil {
		return nil, fmt.Errorf("-match: %w", err)
	}
	if o.cluster.Engine, err = engine.Find(model); err != nil {
		return nil, err
	}
	o.cluster.Slow, err = parseSlow(slow)
	return o, err
}

// list reads the values of a flag, which have commas between them.
func list[T any](to *[]T, flag, text string, read func(string) (T, error)) error {
	for value := range strings.SplitSeq(text, ",") {
		v, err := read(value)
		if err != nil {
			return fmt.Errorf("-%s: %w", flag, err)
		}
		*to = append(*to, v)
	}
	return nil
}

func parseSlow(text string) (s sim.Slow, err error) {
	if text == "" {
		return s, nil
	}
	s.To = 1
	value, span, limited := strings.Cut(text, "@")
	_, err = fmt.Sscanf(value, "%d:%g", &s.Worker, &s.Factor)
	if limited && err == nil {
		_, err = fmt.Sscanf(span, "%g-%g", &s.From, &s.To)
	}
	if err != nil {
		return s, fmt.Errorf("-slow is %q, want worker:factor[@from-to]", text)
	}
	return s, nil
}

// run does all that the command does.
func run(args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if o.fair {
		return o.fairness(stdout, stderr)
	}
	if o.queues != nil {
		return o.holding(stdout, stderr)
	}
	if o.split {
		return o.phases(stdout, stderr)
	}
	if o.hindsight {
		return o.inHindsight(stdout, stderr)
	}
	if o.isGrid {
		return o.grid(stdout, stderr)
	}
	cells, err := o.cells(stderr)
	if err != nil {
		return err
	}
	if err := o.fill(cells, stderr); err != nil {
		return err
	}
	if o.picture != "" {
		f, err := os.Create(o.picture)
		if err != nil {
			return err
		}
		if o.suite {
			err = o.drawMeans(f, o.totals(cells))
		} else {
			err = o.draw(f, cells)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return o.write(stdout, cells)
}

// read returns the trace in a file, or a generated one.
func read(path string) (*trace.Trace, error) {
	if name, ok := strings.CutPrefix(path, "synth:"); ok {
		return synth.Make(name, 1)
	}
	return trace.ReadFile(path)
}

// each calls f with each number below n, as many at once as there are processors. It tells on
// stderr how much is done.
func each(n int, what string, stderr io.Writer, f func(i int) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	var next, ended atomic.Int64
	for range min(runtime.GOMAXPROCS(0), n) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				errs[i] = f(i)
				fmt.Fprintf(stderr, "\r%d of %d %s", ended.Add(1), n, what)
			}
		})
	}
	all.Wait()
	fmt.Fprintln(stderr)
	return errors.Join(errs...)
}

// replayAll returns the results of all runs, in order.
func replayAll(runs []sim.Config, stderr io.Writer) ([]*sim.Result, error) {
	results := make([]*sim.Result, len(runs))
	return results, each(len(runs), "replays", stderr, func(i int) (err error) {
		c := &runs[i]
		if results[i], err = sim.Run(*c); err != nil {
			err = fmt.Errorf("replaying %s with %s at speed %g: %w", c.Trace.Name, c.Policy, c.Speed, err)
		}
		return err
	})
}

// replayMeans makes all runs. Each call of next returns the mean result of the next ones, one run for each seed.
func (o *options) replayMeans(runs []sim.Config, stderr io.Writer) (next func() *sim.Result, err error) {
	results, err := replayAll(runs, stderr)
	return func() *sim.Result {
		r := sim.Mean(results[:len(o.seeds)])
		results = results[len(o.seeds):]
		return r
	}, err
}
