package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// setup is what a trace is replayed with unless flags say otherwise.
type setup struct {
	trace  string // its name
	kv     int64  // tokens of each worker
	warmUp time.Duration
	slice  time.Duration
	scale  float64
}

// setups have the capacities of the replay's suite. Scales above 1 are for first tokens
// that take few milliseconds, which a busy machine blurs. The one below 1 is for a trace
// of slow requests.
var setups = []setup{
	{"mooncake_conversation_a", 500_000, 20 * time.Second, time.Minute, 1.5},
	{"toolagent_like", 500_000, 20 * time.Second, time.Minute, 3},
	{"shared_prefix", 200_000, 20 * time.Second, time.Minute, 2},
	{"azure_code", 200_000, 20 * time.Second, time.Minute, 2},
	{"cc_agent_a", 2_000_000, 200 * time.Second, 200 * time.Second, 0.5},
}

// otherwise is the setup of any other trace.
var otherwise = setup{"", 500_000, 20 * time.Second, time.Minute, 1}

// options are the command's flags.
type options struct {
	traces, trace string
	policies      []string
	workers, runs int
	speed, load   float64
	saturate      string
	seeds         []uint64
	sessions      string
	virtual, json bool
	given         map[string]bool
	flags         setup
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{given: make(map[string]bool)}
	names := slices.Sorted(maps.Keys(directives))
	var policies, seeds string
	f := flag.NewFlagSet("live", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.traces, "traces", "", "comma-separated `directories` and files of traces")
	f.StringVar(&o.trace, "trace", "", "only the trace with this `name`, that of its file without endings")
	f.StringVar(&policies, "policy", "predicted_latency,dynamo,least_load,round_robin", "comma-separated `policies`: some of "+strings.Join(names, ", "))
	f.IntVar(&o.workers, "workers", 8, "the number of workers")
	f.IntVar(&o.runs, "runs", 1, "how often a live run is made at most, as long as a stall of the machine spoils it; the one with the shortest stall counts")
	f.Int64Var(&o.flags.kv, "kv-tokens", 0, "the KV capacity of each worker in `tokens`")
	f.DurationVar(&o.flags.slice, "slice", 0, "how long the slice is, in the engines' `time`")
	f.DurationVar(&o.flags.warmUp, "warmup", 0, "the engines' `time` before the slice, whose requests do not count")
	f.Float64Var(&o.flags.scale, "scale", 0, "how many times slower than the engines' real time passes; below 1 it is faster")
	f.Float64Var(&o.speed, "speed", 0, "the speed of the trace, in place of -load")
	f.Float64Var(&o.load, "load", 0.7, "the speed of the trace, as a `share` of that at saturation")
	f.StringVar(&o.saturate, "saturation", "dynamo", "the `policy` whose saturation -load is a share of")
	f.StringVar(&seeds, "seed", "1,2,3", "comma-separated `seeds` of the replay, whose figures are geometric means over them")
	f.StringVar(&o.sessions, "sessions", "none", "none, or key: requests name their session")
	f.BoolVar(&o.virtual, "virtual", false, "replay in virtual time only")
	f.BoolVar(&o.json, "json", false, "write JSON in place of tables")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	f.Visit(func(f *flag.Flag) { o.given[f.Name] = true })
	o.policies = strings.Split(policies, ",")
	for _, p := range o.policies {
		if directives[p] == "" {
			return nil, fmt.Errorf("-policy has %q, want some of %s", p, strings.Join(names, ", "))
		}
	}
	for item := range strings.SplitSeq(seeds, ",") {
		seed, err := strconv.ParseUint(item, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("-seed has %q, want numbers from 0", item)
		}
		o.seeds = append(o.seeds, seed)
	}
	return o, o.check(f)
}

func (o *options) check(f *flag.FlagSet) error {
	switch {
	case f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.traces == "":
		return errors.New("-traces is missing")
	case o.workers < 1 || o.runs < 1:
		return fmt.Errorf("-workers is %d and -runs %d, want at least 1", o.workers, o.runs)
	case o.sessions != "none" && o.sessions != "key":
		return fmt.Errorf("-sessions is %q, want none or key", o.sessions)
	case o.given["scale"] && !(o.flags.scale >= 0.01 && o.flags.scale <= 100):
		return fmt.Errorf("-scale is %v, want 0.01 to 100", o.flags.scale)
	case o.given["kv-tokens"] && o.flags.kv < 1, o.given["slice"] && o.flags.slice <= 0, o.given["warmup"] && o.flags.warmUp <= 0:
		return errors.New("-kv-tokens, -slice and -warmup must be more than 0")
	case !(o.load > 0) || o.given["speed"] && !(o.speed > 0):
		return errors.New("-load and -speed must be more than 0")
	}
	return nil
}

// setup returns that of a trace, with what the flags change in it.
func (o *options) setup(name string) setup {
	s := otherwise
	if i := slices.IndexFunc(setups, func(s setup) bool { return s.trace == name }); i >= 0 {
		s = setups[i]
	}
	override(o, "kv-tokens", &s.kv, o.flags.kv)
	override(o, "warmup", &s.warmUp, o.flags.warmUp)
	override(o, "slice", &s.slice, o.flags.slice)
	override(o, "scale", &s.scale, o.flags.scale)
	return s
}

func override[T any](o *options, name string, to *T, value T) {
	if o.given[name] {
		*to = value
	}
}

// paths lists the files of the traces.
func (o *options) paths() (paths []string, err error) {
	for path := range strings.SplitSeq(o.traces, ",") {
		found, err := trace.Files(path)
		if err != nil {
			return nil, err
		}
		paths = append(paths, found...)
	}
	if o.trace != "" {
		paths = slices.DeleteFunc(paths, func(path string) bool {
			name, _, _ := strings.Cut(filepath.Base(path), ".")
			return name != o.trace
		})
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("there is no trace %s in %s", o.trace, o.traces)
	}
	return paths, nil
}
