package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
)

// options are the command's flags.
type options struct {
	trace     string
	policies  []string
	loads     []load
	saturate  string // the policy whose saturation the named loads are shares of
	cluster   sim.Cluster
	traces    string // for the suite
	suite     bool
	half      string
	seeds     []uint64
	knowledge string
	sessions  string
	json      bool
	buckets   int
	svg       string
}

// lists are the flags that are parsed after all are known.
type lists struct{ policies, speeds, seeds, kv, told, slow, join, engine string }

func parse(args []string, stderr io.Writer) (*options, error) {
	o, l := new(options), new(lists)
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.trace, "trace", "", "the `file` with the trace: JSON lines, plain or gzipped; or synth:name[:seed], generated: "+strings.Join(synth.Names(), ", "))
	f.BoolVar(&o.suite, "suite", false, "replay all of -traces, each with its own workers, at the loads low, middle, high and overload, with sessions none and key, and sum up; other flags narrow that down")
	f.StringVar(&o.traces, "traces", "", "comma-separated `directories` and files of traces, for -suite; synth is all generated ones")
	f.StringVar(&o.half, "half", "", "first or second: replay this half of the trace only, an open loop by time, a closed one every other session")
	f.StringVar(&l.policies, "policy", "dynamo,predicted_latency", "comma-separated `policies`; the first is compared with. There are "+strings.Join(sim.Policies(), ", "))
	f.StringVar(&l.speeds, "speed", "1", "comma-separated `factors` on the speed of the trace, think times included; with -saturation also low, middle and high, for 0.35, 0.7 and 0.95 of the speed at saturation")
	f.StringVar(&o.saturate, "saturation", "", "find the speed at which this `policy` is saturated, by bisection")
	f.StringVar(&l.engine, "engine", engine.Default().Name, "the `model` of all engines: "+strings.Join(engine.Models(), ", "))
	f.IntVar(&o.cluster.Workers, "workers", 8, "the number of workers")
	f.IntVar(&o.cluster.Ranks, "ranks", 1, "the data-parallel `ranks` of each worker: each is an engine with its own cache and queue")
	f.StringVar(&l.kv, "kv-tokens", "200000", "the KV capacity of each rank in `tokens`; one value, or one for each worker")
	f.StringVar(&l.told, "told-kv-tokens", "", "the capacity in `tokens` that the router is told, if it is another one; as -kv-tokens, or x8 for 8 times the right one")
	f.StringVar(&l.seeds, "seed", "1", "comma-separated `seeds` for what chance decides; the figures are the geometric means over them")
	f.StringVar(&o.knowledge, "knowledge", "approximate", "approximate, or exact: the policies see the engines' blocks in place of the router's mirror; approximate or both with -suite")
	f.StringVar(&o.sessions, "sessions", "none", "none, or key: each request names its session, and the router binds it to a worker: predicted_latency counts that in its cost, the router's other policies keep to it; or both, with -suite")
	f.StringVar(&l.slow, "slow", "", "comma-separated `worker:factor[@from-to]`, what the step times of a worker (from 0) are multiplied with; from and to are shares of the trace's duration")
	f.StringVar(&l.join, "join", "", "comma-separated `worker@share`: the worker joins, with an empty cache, after this share of the trace's duration")
	f.IntVar(&o.buckets, "buckets", 0, "into how many `parts` the time is cut for mean and p50 TTFT over time")
	f.StringVar(&o.svg, "svg", "", "also draw a chart into this `file`: TTFT over time with -buckets, else bars relative to the first policy")
	f.BoolVar(&o.json, "json", false, "write JSON in place of a table")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if o.suite {
		if err := o.suiteDefaults(f, l); err != nil {
			return nil, err
		}
	} else if o.trace == "" {
		return nil, errors.New("-trace is missing")
	}
	if o.half != "" && o.half != "first" && o.half != "second" {
		return nil, fmt.Errorf("-half is %q, want first or second", o.half)
	}
	if o.buckets < 0 || o.buckets > 10_000 || o.buckets > 0 && o.suite {
		return nil, fmt.Errorf("-buckets is %d, want 0 to 10000, and 0 with -suite", o.buckets)
	}
	second := "exact"
	if o.suite {
		second = "both"
	}
	if o.knowledge != "approximate" && o.knowledge != second {
		return nil, fmt.Errorf("-knowledge is %q, want approximate or %s", o.knowledge, second)
	}
	if o.sessions != "none" && o.sessions != "key" && (o.sessions != "both" || !o.suite) {
		return nil, fmt.Errorf("-sessions is %q, want none or key", o.sessions)
	}
	if o.saturate != "" && !slices.Contains(sim.Policies(), o.saturate) {
		return nil, fmt.Errorf("-saturation is %q, want one of %s", o.saturate, strings.Join(sim.Policies(), ", "))
	}
	if err := o.parsePolicies(l.policies); err != nil {
		return nil, err
	}
	var err error
	if o.loads, err = parseLoads(l.speeds); err != nil {
		return nil, err
	}
	if named := slices.ContainsFunc(o.loads, func(l load) bool { return l.speed == 0 }); named && o.saturate == "" {
		return nil, errors.New("-speed names a load, and -saturation is missing")
	}
	if o.seeds, err = seeds(l.seeds); err != nil {
		return nil, err
	}
	return o, o.parseCluster(l)
}

// suiteDefaults sets the flags that were not given to what the suite has.
func (o *options) suiteDefaults(f *flag.FlagSet, l *lists) error {
	given := make(map[string]bool)
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, name := range []string{"trace", "workers", "kv-tokens"} {
		if given[name] {
			return fmt.Errorf("-%s is not for -suite", name)
		}
	}
	if o.traces == "" {
		return errors.New("-traces is missing")
	}
	set := func(name string, value *string, suite string) {
		if !given[name] {
			*value = suite
		}
	}
	available := slices.DeleteFunc(slices.Clone(suitePolicies), func(p string) bool { return !slices.Contains(sim.Policies(), p) })
	set("policy", &l.policies, strings.Join(available, ","))
	set("speed", &l.speeds, "low,middle,high,"+overload)
	set("seed", &l.seeds, "1,2,3")
	set("sessions", &o.sessions, "both")
	set("saturation", &o.saturate, "dynamo")
	return nil
}

func seeds(list string) (values []uint64, err error) {
	for item := range strings.SplitSeq(list, ",") {
		v, err := strconv.ParseUint(item, 10, 64)
		if err != nil || slices.Contains(values, v) {
			return nil, fmt.Errorf("-seed has %q, want different numbers from 0", item)
		}
		values = append(values, v)
	}
	return values, nil
}

func (o *options) parsePolicies(list string) error {
	o.policies = strings.Split(list, ",")
	for i, p := range o.policies {
		if !slices.Contains(sim.Policies(), p) {
			return fmt.Errorf("-policy has %q, want some of %s", p, strings.Join(sim.Policies(), ", "))
		}
		if slices.Contains(o.policies[:i], p) {
			return fmt.Errorf("-policy has %q twice", p)
		}
	}
	return nil
}

func (o *options) parseCluster(l *lists) (err error) {
	c := &o.cluster
	if c.Engine, err = engine.Find(l.engine); err != nil {
		return fmt.Errorf("-engine: %w", err)
	}
	if c.KVTokens, err = tokens("-kv-tokens", l.kv); err != nil {
		return err
	}
	if times, ok := strings.CutPrefix(l.told, "x"); ok {
		f, err := factors("-told-kv-tokens", times)
		if err != nil {
			return err
		}
		c.ToldTimes = f[0]
	} else if l.told != "" {
		if c.ToldTokens, err = tokens("-told-kv-tokens", l.told); err != nil {
			return err
		}
	}
	if err := o.parseSlow(l.slow); err != nil {
		return err
	}
	return o.parseJoin(l.join)
}

func tokens(name, list string) ([]int64, error) {
	var values []int64
	for item := range strings.SplitSeq(list, ",") {
		v, err := strconv.ParseInt(item, 10, 64)
		if err != nil || v < 1 || v > math.MaxInt32 {
			return nil, fmt.Errorf("%s has %q, want a number from 1 to %d", name, item, math.MaxInt32)
		}
		values = append(values, v)
	}
	return values, nil
}

func (o *options) parseSlow(list string) error {
	if list == "" {
		return nil
	}
	for item := range strings.SplitSeq(list, ",") {
		s := sim.Slow{To: 1}
		value, span, limited := strings.Cut(item, "@")
		worker, factor, ok := strings.Cut(value, ":")
		var err error
		if s.Worker, err = strconv.Atoi(worker); !ok || err != nil || s.Worker < 0 || s.Worker >= o.cluster.Workers {
			return fmt.Errorf("-slow has %q, want worker:factor with a worker from 0 to %d", item, o.cluster.Workers-1)
		}
		f, err := factors("-slow", factor)
		if err != nil {
			return err
		}
		s.Factor = f[0]
		if limited {
			from, to, _ := strings.Cut(span, "-")
			var errs [2]error
			s.From, errs[0] = share(from)
			s.To, errs[1] = share(to)
			if errors.Join(errs[:]...) != nil || s.From >= s.To {
				return fmt.Errorf("-slow has %q, want worker:factor@from-to with from below to, both from 0 to 1", item)
			}
		}
		o.cluster.Slow = append(o.cluster.Slow, s)
	}
	return nil
}

func (o *options) parseJoin(list string) error {
	if list == "" {
		return nil
	}
	o.cluster.Join = make(map[int]float64)
	for item := range strings.SplitSeq(list, ",") {
		worker, at, _ := strings.Cut(item, "@")
		w, err := strconv.Atoi(worker)
		when, err2 := share(at)
		if err != nil || err2 != nil || w < 0 || w >= o.cluster.Workers || when == 0 {
			return fmt.Errorf("-join has %q, want worker@share with a worker from 0 to %d and a share above 0, up to 1", item, o.cluster.Workers-1)
		}
		o.cluster.Join[w] = when
	}
	return nil
}

func share(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err == nil && !(v >= 0 && v <= 1) {
		err = strconv.ErrRange
	}
	return v, err
}

func factors(name, list string) ([]float64, error) {
	items := strings.Split(list, ",")
	values := make([]float64, 0, len(items))
	for _, item := range items {
		v, err := strconv.ParseFloat(item, 64)
		if err != nil || !(v >= 1e-3 && v <= 1e3) {
			return nil, fmt.Errorf("%s has %q, want a number from 0.001 to 1000", name, item)
		}
		values = append(values, v)
	}
	return values, nil
}
