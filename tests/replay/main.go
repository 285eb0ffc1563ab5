// Command replay compares routing policies: it replays a trace of requests against
// modelled engines in virtual time. The scheduler, its index, leases and
// policies are those that serve traffic; engines and published rules are models.
//
//	go run ./tests/replay -trace F -policy dynamo,predicted_latency -workers 8 -kv-tokens 200000 -speed 1,2
//	go run ./tests/replay -suite -traces DIR
//
// The first policy is what the others are compared with. See -help for the rest.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"

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
	trace     string
	traces    string // for the suite
	suite     bool
	policies  []string
	speeds    []float64
	seeds     []uint64
	cluster   sim.Cluster
	knowledge string
	sessions  string
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := new(options)
	var policies, speeds, seeds, kv, told, slow, model string
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.trace, "trace", "", "the `file` with the trace: JSON lines, plain or gzipped; or synth:name[:seed], generated: "+strings.Join(synth.Names(), ", "))
	f.BoolVar(&o.suite, "suite", false, "replay all of -traces, each with its own workers and loads, with and without session keys, and sum up")
	f.StringVar(&o.traces, "traces", "", "comma-separated `directories` and files of traces, for -suite; synth is all generated ones")
	f.StringVar(&policies, "policy", "", "comma-separated `policies`; the first is compared with. There are "+strings.Join(sim.Policies(), ", "))
	f.StringVar(&speeds, "speed", "1", "comma-separated `factors` on the speed of the trace, think times included")
	f.StringVar(&model, "engine", engine.Default().Name, "the `model` of all engines: "+strings.Join(engine.Models(), ", "))
	f.IntVar(&o.cluster.Workers, "workers", 8, "the number of workers")
	f.IntVar(&o.cluster.Ranks, "ranks", 1, "the data-parallel `ranks` of each worker: each is an engine with its own cache and queue")
	f.StringVar(&kv, "kv-tokens", "200000", "the KV capacity of each rank in `tokens`; one value, or one for each worker")
	f.StringVar(&told, "told-kv-tokens", "1", "how many `times` the right capacity the router is told")
	f.StringVar(&seeds, "seed", "", "comma-separated `seeds` for what chance decides; the figures are the geometric means over them")
	f.StringVar(&o.knowledge, "knowledge", "approximate", "approximate, or exact: the policies see the engines' blocks in place of the router's mirror; approximate or both with -suite")
	f.StringVar(&o.sessions, "sessions", "", "none, or key: each request names its session, and the router binds it to a worker; the suite has both")
	f.StringVar(&slow, "slow", "", "`worker:factor[@from-to]`: what the step times of a worker (from 0) are multiplied with; from and to are shares of the trace's duration")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	set := func(to *string, alone, suite string) {
		switch {
		case *to != "":
		case o.suite:
			*to = suite
		default:
			*to = alone
		}
	}
	set(&policies, "dynamo,predicted_latency", strings.Join(suitePolicies, ","))
	set(&seeds, "1", "1,2,3")
	set(&o.sessions, "none", "both")
	second := map[bool]string{false: "exact", true: "both"}[o.suite]
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.suite && o.traces == "":
		return nil, errors.New("-traces is missing")
	case !o.suite && o.trace == "":
		return nil, errors.New("-trace is missing")
	case o.knowledge != "approximate" && o.knowledge != second:
		return nil, fmt.Errorf("-knowledge is %q, want approximate or %s", o.knowledge, second)
	case o.sessions != "none" && o.sessions != "key" && (o.sessions != "both" || !o.suite):
		return nil, fmt.Errorf("-sessions is %q, want none or key", o.sessions)
	}
	o.policies = strings.Split(policies, ",")
	for i, p := range o.policies {
		if !slices.Contains(sim.Policies(), p) || slices.Contains(o.policies[:i], p) {
			return nil, fmt.Errorf("-policy has %q, want different ones of %s", p, strings.Join(sim.Policies(), ", "))
		}
	}
	c := &o.cluster
	var times []float64
	var errs [6]error
	o.speeds, errs[0] = numbers[float64]("-speed", speeds, 1e-3, 1e3)
	o.seeds, errs[1] = numbers[uint64]("-seed", seeds, 0, 1<<52)
	c.KVTokens, errs[2] = numbers[int64]("-kv-tokens", kv, 1, math.MaxInt32)
	times, errs[3] = numbers[float64]("-told-kv-tokens", strings.TrimPrefix(told, "x"), 1e-3, 1e3)
	c.Slow, errs[4] = parseSlow(slow)
	c.Engine, errs[5] = engine.Find(model)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	c.ToldTimes = times[0]
	return o, nil
}

// numbers parses a list.
func numbers[T float64 | uint64 | int64](name, list string, least, most float64) (values []T, err error) {
	for item := range strings.SplitSeq(list, ",") {
		v, err := strconv.ParseFloat(item, 64)
		if err != nil || !(v >= least && v <= most) {
			return nil, fmt.Errorf("%s has %q, want a number from %g to %g", name, item, least, most)
		}
		values = append(values, T(v))
	}
	return values, nil
}

func parseSlow(text string) ([]sim.Slow, error) {
	if text == "" {
		return nil, nil
	}
	s := sim.Slow{To: 1}
	value, span, limited := strings.Cut(text, "@")
	_, err := fmt.Sscanf(value, "%d:%g", &s.Worker, &s.Factor)
	if limited && err == nil {
		_, err = fmt.Sscanf(span, "%g-%g", &s.From, &s.To)
	}
	if err != nil {
		return nil, fmt.Errorf("-slow is %q, want worker:factor[@from-to]", text)
	}
	return []sim.Slow{s}, nil
}

// run does all that the command does.
func run(args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if o.suite {
		s, err := o.runSuite(stderr)
		if err != nil {
			return err
		}
		return writeSuite(stdout, o, s)
	}
	t, results, err := o.replay(stderr)
	if err != nil {
		return err
	}
	return o.write(stdout, t, results)
}

// replay replays a trace at each speed with each policy.
func (o *options) replay(stderr io.Writer) (*trace.Trace, []*sim.Result, error) {
	t, err := read(o.trace)
	if err != nil {
		return nil, nil, err
	}
	var runs []sim.Config
	for _, speed := range o.speeds {
		for _, policy := range o.policies {
			for _, seed := range o.seeds {
				runs = append(runs, sim.Config{
					Trace: t, Policy: policy, Cluster: o.cluster, Speed: speed, Seed: seed, Exact: o.knowledge == "exact", Sessions: o.sessions == "key",
				})
			}
		}
	}
	all, err := replayAll(runs, stderr)
	if err != nil {
		return nil, nil, err
	}
	var results []*sim.Result
	for same := range slices.Chunk(all, len(o.seeds)) {
		r := sim.Mean(same)
		results = append(results, r)
		r.Relative = r.Over(results[(len(results)-1)/len(o.policies)*len(o.policies)].Figures)
	}
	return t, results, nil
}

// read returns the trace in a file, or a synthetic one.
func read(path string) (t *trace.Trace, err error) {
	spec, ok := strings.CutPrefix(path, "synth:")
	if !ok {
		return trace.ReadFile(path)
	}
	name, seed, given := strings.Cut(spec, ":")
	n := uint64(1)
	if given {
		if n, err = strconv.ParseUint(seed, 10, 64); err != nil {
			return nil, fmt.Errorf("-trace has %q, want synth:name or synth:name:seed", path)
		}
	}
	return synth.Make(name, n)
}

// replayAll replays, as many at once as there are processors, and returns the
// results in order.
func replayAll(runs []sim.Config, stderr io.Writer) ([]*sim.Result, error) {
	results, errs := make([]*sim.Result, len(runs)), make([]error, len(runs))
	var all sync.WaitGroup
	var next, ended atomic.Int64
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(runs); i = int(next.Add(1)) - 1 {
				c := &runs[i]
				if results[i], errs[i] = sim.Run(*c); errs[i] != nil {
					errs[i] = fmt.Errorf("replaying %s with %s at speed %g: %w", c.Trace.Name, c.Policy, c.Speed, errs[i])
				}
				fmt.Fprintf(stderr, "\r%d of %d replays", ended.Add(1), len(runs))
			}
		})
	}
	all.Wait()
	fmt.Fprintln(stderr)
	return results, errors.Join(errs...)
}

func commas[T any](values []T) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ",")
}

// write writes each figure with its ratio to that of the first policy.
func (o *options) write(w io.Writer, t *trace.Trace, results []*sim.Result) error {
	c := &o.cluster
	fmt.Fprintf(w, "%s: %d requests, %d workers (%s) of %s KV tokens, sessions %s, seeds %s; times in ms; in brackets relative to %s\n",
		t.Name, len(t.Requests), c.Workers, c.Engine.Name, commas(c.KVTokens), o.sessions, commas(o.seeds), o.policies[0])
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "speed\tpolicy\tknowledge\tTTFT mean\tp50\tp99\te2e mean\thit ratio\tspread")
	for _, r := range results {
		v := r.Relative
		fmt.Fprintf(tw, "%.4g\t%s\t%s\t%.0f (%.3f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.3f (%.2f)\t%.3f\n",
			r.Speed, r.Policy, r.Knowledge, r.MeanTTFT, v.MeanTTFT, r.P50TTFT, v.P50TTFT, r.P99TTFT, v.P99TTFT, r.MeanE2E, v.MeanE2E,
			r.HitRatio, v.HitRatio, r.Spread)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		if r.PolicyFaults+r.Expired+r.Untracked > 0 {
			fmt.Fprintf(w, "%s at %g: %d choices spoilt by the policy, %d leases expired, %d prompts not in the mirror whole\n",
				r.Policy, r.Speed, r.PolicyFaults, r.Expired, r.Untracked)
		}
	}
	return nil
}
