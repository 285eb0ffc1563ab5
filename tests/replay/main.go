// Command replay compares routing policies: it replays a trace of requests against
// modelled engines in virtual time. The scheduler, its index, leases and
// policies are those that serve traffic; engines and published rules are models.
//
//	go run ./tests/replay -trace F -policy dynamo_1,dynamo -workers 8 -kv-tokens 200000 -speed 1,2
//
// The first policy is what the others are compared with. See -help for the rest.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
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
	policies  []string
	speeds    []float64
	slow      map[int]float64
	workers   int
	kv, told  int64
	seed      uint64
	knowledge string
	sessions  string
	json      bool
}

func run(args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	t, err := trace.ReadFile(o.trace)
	if err != nil {
		return err
	}
	cells := o.cells(t)
	results, err := replayAll(cells, stderr)
	if err != nil {
		return err
	}
	compare(results, len(o.policies))
	if o.json {
		return writeJSON(stdout, o, t, results)
	}
	return writeTable(stdout, o, t, results)
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{slow: make(map[int]float64)}
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.trace, "trace", "", "the `file` with the trace: JSON lines, plain or gzipped")
	policies := f.String("policy", "dynamo_1,dynamo", "comma-separated `policies`; the first is compared with. There are "+strings.Join(sim.Policies(), ", "))
	speeds := f.String("speed", "1", "comma-separated `factors` on the speed of the trace, think times included")
	f.IntVar(&o.workers, "workers", 8, "the number of engines")
	f.Int64Var(&o.kv, "kv-tokens", 200_000, "the KV capacity of each engine in `tokens`")
	f.Int64Var(&o.told, "told-kv-tokens", 0, "the capacity in `tokens` that the router is told, if it is another one")
	f.Uint64Var(&o.seed, "seed", 1, "for what chance decides")
	f.StringVar(&o.knowledge, "knowledge", "approximate", "approximate, or exact: the comparison policies (those that the router does not offer) see the engines' blocks in place of the router's mirror")
	f.StringVar(&o.sessions, "sessions", "none", "none, or key: each request names its session, and the router binds it to a worker (hard)")
	slow := f.String("slow", "", "comma-separated `worker:factor`, what the step times of a worker (from 0) are multiplied with")
	f.BoolVar(&o.json, "json", false, "write JSON in place of a table")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	var err error
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.trace == "":
		return nil, errors.New("-trace is missing")
	case o.knowledge != "approximate" && o.knowledge != "exact":
		return nil, fmt.Errorf("-knowledge is %q, want approximate or exact", o.knowledge)
	}
	if o.sessions != "none" && o.sessions != "key" && o.sessions != "soft" {
		return nil, fmt.Errorf("-sessions is %q, want none or key", o.sessions)
	}
	o.policies = strings.Split(*policies, ",")
	for i, p := range o.policies {
		if !slices.Contains(sim.Policies(), p) {
			return nil, fmt.Errorf("-policy has %q, want some of %s", p, strings.Join(sim.Policies(), ", "))
		}
		if slices.Contains(o.policies[:i], p) {
			return nil, fmt.Errorf("-policy has %q twice", p)
		}
	}
	if o.speeds, err = factors("-speed", *speeds); err != nil {
		return nil, err
	}
	return o, o.parseSlow(*slow)
}

func (o *options) parseSlow(list string) error {
	if list == "" {
		return nil
	}
	for item := range strings.SplitSeq(list, ",") {
		worker, factor, ok := strings.Cut(item, ":")
		w, err := strconv.Atoi(worker)
		if !ok || err != nil || w < 0 || w >= o.workers {
			return fmt.Errorf("-slow has %q, want worker:factor with a worker from 0 to %d", item, o.workers-1)
		}
		f, err := factors("-slow", factor)
		if err != nil {
			return err
		}
		o.slow[w] = f[0]
	}
	return nil
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

// cells lists what is to be replayed: each policy at each speed.
func (o *options) cells(t *trace.Trace) []*cell {
	cells := make([]*cell, 0, len(o.speeds)*len(o.policies))
	for _, speed := range o.speeds {
		for _, policy := range o.policies {
			c := &cell{Config: sim.Config{
				Trace: t, Policy: policy, Workers: o.workers, KVTokens: o.kv, ToldTokens: o.told,
				Speed: speed, Seed: o.seed, Exact: o.knowledge == "exact", Sessions: o.sessions != "none", Soft: o.sessions == "soft", Slow: o.slow,
			}}
			c.Progress = func(over int) { c.over.Store(int64(over)) }
			cells = append(cells, c)
		}
	}
	return cells
}

// cell is one replay, and how far it is.
type cell struct {
	sim.Config
	over    atomic.Int64
	started atomic.Bool
	ended   atomic.Bool
}

// replayAll replays the cells, as many at once as there are processors, and returns
// the results in their order.
func replayAll(cells []*cell, stderr io.Writer) ([]*sim.Result, error) {
	results, errs := make([]*sim.Result, len(cells)), make([]error, len(cells))
	var all sync.WaitGroup
	var next atomic.Int64
	for range min(runtime.GOMAXPROCS(0), len(cells)) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(cells); i = int(next.Add(1)) - 1 {
				cells[i].started.Store(true)
				results[i], errs[i] = sim.Run(cells[i].Config)
				cells[i].ended.Store(true)
			}
		})
	}
	done, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		watch(cells, stderr, done)
	}()
	all.Wait()
	close(done)
	<-watched
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("replaying %s at speed %g: %w", cells[i].Policy, cells[i].Speed, err)
		}
	}
	return results, nil
}

// watch reports progress until done.
func watch(cells []*cell, w io.Writer, done <-chan struct{}) {
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		ended := 0
		var now []string
		for _, c := range cells {
			switch {
			case c.ended.Load():
				ended++
			case c.started.Load():
				now = append(now, fmt.Sprintf("%s at %g: %d of %d requests", c.Policy, c.Speed, c.over.Load(), len(c.Trace.Requests)))
			}
		}
		fmt.Fprintf(w, "%d of %d cells; %s\n", ended, len(cells), strings.Join(now, "; "))
	}
}

// compare relates each result to that of the first policy at the same speed.
func compare(results []*sim.Result, policies int) {
	for i, r := range results {
		r.Relative = r.Over(results[i-i%policies].Figures)
	}
}
