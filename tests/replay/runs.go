package main

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// running is one replay, and how far it is.
type running struct {
	sim.Config
	over    atomic.Int64
	started atomic.Bool
	ended   atomic.Bool
}

func newRun(c sim.Config) *running {
	r := &running{Config: c}
	r.Progress = func(over int) { r.over.Store(int64(over)) }
	return r
}

// runs lists what is to be replayed: each policy at each speed with each seed.
func (o *options) runs(t *trace.Trace) (runs []*running) {
	for _, l := range o.loads {
		for _, policy := range o.policies {
			for _, seed := range o.seeds {
				runs = append(runs, newRun(sim.Config{
					Trace: t, Policy: policy, Cluster: o.cluster,
					Speed: l.speed, Seed: seed, Exact: o.knowledge == "exact", Sessions: o.sessions == "key", Buckets: o.buckets,
				}))
			}
		}
	}
	return runs
}

// replayAll replays, as many at once as there are processors, and returns the
// results in order.
func replayAll(runs []*running, stderr io.Writer) ([]*sim.Result, error) {
	results, errs := make([]*sim.Result, len(runs)), make([]error, len(runs))
	var all sync.WaitGroup
	var next atomic.Int64
	var failed atomic.Bool
	for range min(runtime.GOMAXPROCS(0), len(runs)) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(runs) && !failed.Load(); i = int(next.Add(1)) - 1 {
				runs[i].started.Store(true)
				if results[i], errs[i] = sim.Run(runs[i].Config); errs[i] != nil {
					failed.Store(true)
				}
				runs[i].ended.Store(true)
			}
		})
	}
	done, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		watch(runs, stderr, done)
	}()
	all.Wait()
	close(done)
	<-watched
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("replaying %s with %s at speed %g: %w", runs[i].Trace.Name, runs[i].Policy, runs[i].Speed, err)
		}
	}
	return results, nil
}

// watch reports progress until done.
func watch(runs []*running, w io.Writer, done <-chan struct{}) {
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
		for _, r := range runs {
			switch {
			case r.ended.Load():
				ended++
			case r.started.Load():
				now = append(now, fmt.Sprintf("%s with %s at %.3g: %d of %d requests", r.Trace.Name, r.Policy, r.Speed, r.over.Load(), len(r.Trace.Requests)))
			}
		}
		fmt.Fprintf(w, "%d of %d replays; %s\n", ended, len(runs), strings.Join(now, "; "))
	}
}
