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

// cells lists what is to be replayed: each policy at each speed.
func (o *options) cells(t *trace.Trace) []*cell {
	cells := make([]*cell, 0, len(o.speeds)*len(o.policies))
	for _, speed := range o.speeds {
		for _, policy := range o.policies {
			c := &cell{Config: sim.Config{
				Trace: t, Policy: policy, Cluster: o.cluster,
				Speed: speed, Seed: o.seed, Exact: o.knowledge == "exact", Sessions: o.sessions == "key",
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
