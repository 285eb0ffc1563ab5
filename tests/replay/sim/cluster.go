package sim

import (
	"fmt"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// Cluster is the workers that a trace is replayed against.
type Cluster struct {
	// Engine is the model of all engines.
	Engine *engine.Model
	// Workers is the number of workers, from 0 on.
	Workers int
	// KVTokens is the capacity of each worker.
	KVTokens int64
	// ToldTimes is by what the capacity is multiplied for the scheduler.
	ToldTimes float64
	// Preempt says that the engines admit prompts without room for their answers.
	Preempt bool
	// Slow says when which worker is slower.
	Slow Slow
	// Mixed is what the step times of every other worker are multiplied with, from the first one
	// on; 0: all workers are alike.
	Mixed float64
	Split
}

// Split is a cluster in which the first workers do prefill phases only.
type Split struct {
	// Prefill is the number of these workers; 0: requests are never split.
	Prefill int
	// Phases is the rule by which requests are split.
	Phases kvscore.SplitRule
	// GBs is the speed of a transfer of KV, in GB/s. Transfers do not slow each other.
	GBs float64
}

const (
	// kvBytes are those of one token of a model of 8B parameters.
	kvBytes = 128 << 10
	// handshake is what a transfer takes at least.
	handshake = 2 * time.Millisecond
)

// transfer returns how long a transfer takes.
func (p *Split) transfer(tokens int) time.Duration {
	return handshake + time.Duration(float64(tokens)*kvBytes/p.GBs) // GB/s are bytes a nanosecond
}

// Slow makes a worker slower for a part of the trace's duration.
type Slow struct {
	Worker   int
	Factor   float64 // on the time of a step; 0: no worker is slow
	From, To float64 // shares of the duration
}

// blocks returns the capacity of each worker.
func (c *Cluster) blocks(blockTokens int) int {
	return int(float64(c.KVTokens)*c.Engine.Memory) / blockTokens
}

// check also checks that each request fits into each engine.
func (c *Cluster) check(t *trace.Trace) error {
	switch {
	case c.Workers < 1:
		return fmt.Errorf("workers is %d, want at least 1", c.Workers)
	case c.Slow.Worker < 0 || c.Slow.Worker >= c.Workers || c.Slow.Factor < 0:
		return fmt.Errorf("slow is %v, want a worker from 0 to %d and a factor", c.Slow, c.Workers-1)
	case c.Prefill < 0 || c.Prefill >= c.Workers || c.Prefill > 0 && !(c.GBs > 0):
		return fmt.Errorf("split is %+v, want fewer prefill workers than workers, and a speed", c.Split)
	}
	room := c.blocks(t.BlockTokens)
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
	each := r.blocks(block)
	var common *engine.Cache
	var line *engine.Line
	if r.spec.Reference {
		common, line = engine.NewCache(each*r.Workers), new(engine.Line)
	}
	for w := range r.Workers {
		cache := common
		if cache == nil {
			cache = engine.NewCache(each)
		}
		e := engine.New(r.Engine, cache, line, block)
		if r.Mixed > 0 && w%2 == 0 {
			e.SetSlow(r.Mixed)
		}
		if r.Preempt {
			e.Preempt()
		}
		r.view.Engines = append(r.view.Engines, e)
		t := kvscore.Target{Worker: uint64(w) + 1}
		r.targets = append(r.targets, t)
		for _, o := range r.routers {
			o.scheduler.Declare(t, int64(r.ToldTimes*float64(each*block)))
			o.scheduler.SetPage(t, int64(block))
		}
	}
	r.engines = r.view.Engines
	r.stepping = make([]bool, len(r.engines))
	for _, o := range r.routers {
		o.refs = o.scheduler.Refs(r.targets...)
	}
}

// slow sets how fast the slow worker is now.
func (r *replay) slow() {
	if r.Slow.Factor == 0 {
		return
	}
	factor := 1.0
	when := func(share float64) time.Duration { return r.scaled(time.Duration(share * float64(r.whole))) }
	if r.now >= when(r.Slow.From) && (r.Slow.To >= 1 || r.now < when(r.Slow.To)) {
		factor = r.Slow.Factor
	}
	r.engines[r.Slow.Worker].SetSlow(factor)
}
