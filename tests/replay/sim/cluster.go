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
	// ToldTokens is what the scheduler gets as the capacity, none for ToldTimes the
	// same; 0 is 1.
	KVTokens, ToldTokens []int64
	ToldTimes            float64
	// Slow lists when which workers are slower.
	Slow []Slow
	// Join lists when which workers join; the others are there from the start.
	Join map[int]float64
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

// of returns the value of a worker.
func of(values []int64, worker int) int64 {
	if len(values) == 1 {
		return values[0]
	}
	return values[worker]
}

// blocks returns the capacity of each rank of a worker.
func (c *Cluster) blocks(worker, blockTokens int) int {
	return int(float64(of(c.KVTokens, worker))*c.model().Memory) / blockTokens
}

func (c *Cluster) check(t *trace.Trace) error {
	switch {
	case c.Workers < 1:
		return fmt.Errorf("workers is %d, want at least 1", c.Workers)
	case c.Ranks < 0:
		return fmt.Errorf("ranks is %d, want at least 0", c.Ranks)
	case len(c.KVTokens) != 1 && len(c.KVTokens) != c.Workers:
		return fmt.Errorf("there are %d values of KV tokens for %d workers, want 1 or %d", len(c.KVTokens), c.Workers, c.Workers)
	case len(c.ToldTokens) > 1 && len(c.ToldTokens) != c.Workers:
		return fmt.Errorf("there are %d values of told KV tokens for %d workers, want 1 or %d", len(c.ToldTokens), c.Workers, c.Workers)
	case len(c.Join) >= c.Workers:
		return fmt.Errorf("all %d workers join later: there is none at the start", c.Workers)
	}
	for _, told := range c.ToldTokens {
		if told < 0 {
			return fmt.Errorf("told KV tokens is %d, want at least 0", told)
		}
	}
	for _, s := range c.Slow {
		if s.Worker < 0 || s.Worker >= c.Workers || !(s.Factor > 0) || !(s.From >= 0 && s.From < s.To) {
			return fmt.Errorf("slow is %d:%v@%v-%v, want a worker from 0 to %d, more than 0, and a span", s.Worker, s.Factor, s.From, s.To, c.Workers-1)
		}
	}
	for w, at := range c.Join {
		if w < 0 || w >= c.Workers || !(at > 0) {
			return fmt.Errorf("join is %d@%v, want a worker from 0 to %d and more than 0", w, at, c.Workers-1)
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

// order lists the workers, those that join last. A list of engines that only grows
// keeps their positions.
func (c *Cluster) order() []int {
	workers := make([]int, c.Workers)
	for w := range workers {
		workers[w] = w
	}
	slices.SortStableFunc(workers, func(a, b int) int { return cmp.Compare(c.Join[a], c.Join[b]) })
	return workers
}

// buildCluster makes the engines, and makes those known that are there.
func (r *replay) buildCluster() {
	block, order := r.Trace.BlockTokens, r.order()
	var common *engine.Cache
	var line *engine.Line
	switch {
	case r.spec.unbounded:
		common, line = engine.NewCache(0), new(engine.Line)
	case r.spec.pooled:
		all := 0
		for w := range r.Workers {
			all += r.blocks(w, block) * r.ranks()
		}
		common, line = engine.NewCache(all), new(engine.Line)
	}
	for _, w := range order {
		for rank := range r.ranks() {
			cache := common
			if cache == nil {
				cache = engine.NewCache(r.blocks(w, block))
			}
			r.engines = append(r.engines, engine.New(r.model(), cache, line, block))
			r.targets = append(r.targets, kvscore.Target{Worker: uint64(w) + 1, Rank: uint32(rank)})
		}
	}
	r.stepping = make([]bool, len(r.engines))
	r.join(r.Workers - len(r.Join))
	r.plan(order)
}

// plan lists the changes of the cluster in their order.
func (r *replay) plan(order []int) {
	whole := r.Trace.Duration()
	at := func(share float64) time.Duration { return r.scaled(time.Duration(share * float64(whole))) }
	for i, w := range order[r.Workers-len(r.Join):] {
		there := r.Workers - len(r.Join) + i + 1
		r.changes = append(r.changes, change{at(r.Join[w]), func(r *replay) { r.join(there) }})
	}
	for _, s := range r.Slow {
		first := slices.Index(order, s.Worker) * r.ranks()
		set := func(factor float64) func(*replay) {
			return func(r *replay) {
				for _, e := range r.engines[first : first+r.ranks()] {
					e.SetSlow(factor)
				}
			}
		}
		r.changes = append(r.changes, change{at(s.From), set(s.Factor)})
		if s.To < 1 {
			r.changes = append(r.changes, change{at(s.To), set(1)})
		}
	}
	slices.SortStableFunc(r.changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
}

// told returns the capacity of each rank of a worker as the router gets it.
func (r *replay) told(worker int) int64 {
	switch {
	case len(r.ToldTokens) > 0:
		return of(r.ToldTokens, worker)
	case r.ToldTimes > 0:
		return int64(r.ToldTimes * float64(r.blocks(worker, r.Trace.BlockTokens)*r.Trace.BlockTokens))
	}
	return int64(r.blocks(worker, r.Trace.BlockTokens) * r.Trace.BlockTokens)
}

// join makes the engines of the first so many workers known to the router.
func (r *replay) join(workers int) {
	known, n := len(r.view.Engines), workers*r.ranks()
	for i := known; i < n; i++ {
		w := int(r.targets[i].Worker) - 1
		r.scheduler.Declare(r.targets[i], r.told(w))
		r.scheduler.SetPage(r.targets[i], int64(r.Trace.BlockTokens))
	}
	r.refs = r.scheduler.Refs(r.targets[:n])
	r.view.Engines = r.engines[:n]
	r.stats.joined(r.now, n)
}
