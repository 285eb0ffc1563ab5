package sim

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// Cluster is the workers that a trace is replayed against.
type Cluster struct {
	// Engine is the model of all engines, engine.Default if it is nil.
	Engine *engine.Model
	// Workers is the number of workers, from 0 on.
	Workers int
	// Ranks is the number of data-parallel ranks of each worker, 1 if it is 0. Each
	// rank is an engine with a cache and a queue of its own, and a target.
	Ranks int
	// KVTokens is the capacity of each rank, by worker; one value is for all workers.
	KVTokens []int64
	// ToldTimes is by what the capacity is multiplied for the scheduler; 0 is 1.
	ToldTimes float64
	// Slow lists when which workers are slower.
	Slow []Slow
}

// Slow makes a worker slower for a part of the trace's duration.
type Slow struct {
	Worker   int
	Factor   float64 // on the time of a step
	From, To float64 // shares of the duration
}

// change is a change of the cluster at a time.
type change struct {
	at    time.Duration
	apply func(*replay)
}

func (c *Cluster) model() *engine.Model {
	if c.Engine == nil {
		return engine.Default()
	}
	return c.Engine
}

func (c *Cluster) ranks() int { return max(1, c.Ranks) }

// blocks returns the capacity of each rank of a worker.
func (c *Cluster) blocks(worker, blockTokens int) int {
	tokens := c.KVTokens[min(worker, len(c.KVTokens)-1)] // one value is for all
	return int(float64(tokens)*c.model().Memory) / blockTokens
}

func (c *Cluster) check(t *trace.Trace) error {
	switch {
	case c.Workers < 1:
		return fmt.Errorf("workers is %d, want at least 1", c.Workers)
	case c.Ranks < 0:
		return fmt.Errorf("ranks is %d, want at least 0", c.Ranks)
	case len(c.KVTokens) != 1 && len(c.KVTokens) != c.Workers:
		return fmt.Errorf("there are %d values of KV tokens for %d workers, want 1 or %d", len(c.KVTokens), c.Workers, c.Workers)
	}
	for _, s := range c.Slow {
		if s.Worker < 0 || s.Worker >= c.Workers || !(s.Factor > 0) || !(s.From >= 0 && s.From < s.To) {
			return fmt.Errorf("slow is %d:%v@%v-%v, want a worker from 0 to %d, more than 0, and a span", s.Worker, s.Factor, s.From, s.To, c.Workers-1)
		}
	}
	return c.fits(t)
}

// fits checks that each request fits into each engine.
func (c *Cluster) fits(t *trace.Trace) error {
	room := c.blocks(0, t.BlockTokens)
	for w := range c.Workers {
		room = min(room, c.blocks(w, t.BlockTokens))
	}
	for i := range t.Requests {
		q := &t.Requests[i]
		if j := (engine.Job{In: q.In, Out: q.Out}); j.Blocks(t.BlockTokens) > room {
			return fmt.Errorf("a request of %d + %d tokens does not fit into %d KV tokens", q.In, q.Out, room*t.BlockTokens)
		}
	}
	return nil
}

// buildCluster makes the engines and makes them known.
func (r *replay) buildCluster() {
	block := r.Trace.BlockTokens
	var common *engine.Cache
	var line *engine.Line
	if r.spec.Reference {
		all := 0
		for w := range r.Workers {
			all += r.blocks(w, block) * r.ranks()
		}
		common, line = engine.NewCache(all), new(engine.Line)
	}
	told := max(r.ToldTimes, 0)
	if told == 0 {
		told = 1
	}
	for w := range r.Workers {
		for rank := range r.ranks() {
			cache := common
			if cache == nil {
				cache = engine.NewCache(r.blocks(w, block))
			}
			r.view.Engines = append(r.view.Engines, engine.New(r.model(), cache, line, block))
			t := kvscore.Target{Worker: uint64(w) + 1, Rank: uint32(rank)}
			r.targets = append(r.targets, t)
			r.scheduler.Declare(t, int64(told*float64(r.blocks(w, block)*block)))
			r.scheduler.SetPage(t, int64(block))
		}
	}
	r.engines = r.view.Engines
	r.stepping = make([]bool, len(r.engines))
	r.refs = r.scheduler.Refs(r.targets)
	r.plan()
}

// plan lists the changes of the cluster in their order.
func (r *replay) plan() {
	whole := r.Trace.Duration()
	for _, s := range r.Slow {
		set := func(share, factor float64) {
			at := r.scaled(time.Duration(share * float64(whole)))
			r.changes = append(r.changes, change{at, func(r *replay) {
				for _, e := range r.engines[s.Worker*r.ranks() : (s.Worker+1)*r.ranks()] {
					e.SetSlow(factor)
				}
			}})
		}
		set(s.From, s.Factor)
		if s.To < 1 {
			set(s.To, 1)
		}
	}
	slices.SortStableFunc(r.changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
}
