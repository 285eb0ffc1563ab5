// Command replay compares routing policies: it replays a trace of requests against
// modelled engines in virtual time. The scheduler, its index, leases and
// policies are those that serve traffic; engines and published rules are models.
//
//	go run ./tests/replay -trace F -policy dynamo,predicted_latency -workers 8 -kv-tokens 200000 -speed 1,2
//
// The first policy is what the others are compared with. See -help for the rest.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

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

// run does all that the command does.
func run(args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if o.suite {
		return o.runSuite(stdout, stderr)
	}
	t, err := o.read(o.trace)
	if err != nil {
		return err
	}
	saturation, err := o.setSpeeds(t, stderr)
	if err != nil {
		return err
	}
	results, err := replayAll(o.runs(t), stderr)
	if err != nil {
		return err
	}
	results = overSeeds(results, len(o.seeds))
	compare(results, len(o.policies))
	if err := o.draw(func(w io.Writer) error { return o.drawResults(w, t, results) }); err != nil {
		return err
	}
	if o.json {
		return writeJSON(stdout, o, t, saturation, results)
	}
	return writeTable(stdout, o, t, saturation, results)
}

// read returns the trace in a file or a synthetic one, or the half of it that is asked
// for.
func (o *options) read(path string) (t *trace.Trace, err error) {
	if spec, ok := strings.CutPrefix(path, "synth:"); ok {
		name, seed, given := strings.Cut(spec, ":")
		n := uint64(1)
		if given {
			if n, err = strconv.ParseUint(seed, 10, 64); err != nil {
				return nil, fmt.Errorf("-trace has %q, want synth:name or synth:name:seed", path)
			}
		}
		t, err = synth.Make(name, n)
	} else {
		t, err = trace.ReadFile(path)
	}
	if err != nil || o.half == "" {
		return t, err
	}
	if t = t.Half(o.half == "second"); len(t.Requests) == 0 {
		return nil, fmt.Errorf("the %s half of %s has no requests", o.half, t.Name)
	}
	return t, nil
}

// overSeeds returns the means over the seeds, which follow each other.
func overSeeds(results []*sim.Result, seeds int) []*sim.Result {
	means := make([]*sim.Result, 0, len(results)/seeds)
	for same := range slices.Chunk(results, seeds) {
		means = append(means, sim.Mean(same))
	}
	return means
}

// compare relates each result to that of the first policy at the same speed.
func compare(results []*sim.Result, policies int) {
	for i, r := range results {
		r.Relative = r.Over(results[i-i%policies].Figures)
	}
}
