package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// cell is one slice of a trace, and what it is replayed against.
type cell struct {
	slice    *trace.Trace
	workers  int
	kvTokens int64
	speed    float64       // how much faster than the trace the engines' time passes
	scale    float64       // how much slower than the engines' time real time passes
	warmUp   time.Duration // in the engines' time
	keys     bool          // requests name their session
	seeds    []uint64
}

// figures are what a run showed after the warm-up. Times are in ms of the engines'
// time.
type figures struct {
	Requests int     `json:"requests"`
	MeanTTFT float64 `json:"ttft_mean_ms"`
	P50TTFT  float64 `json:"ttft_p50_ms"`
	P99TTFT  float64 `json:"ttft_p99_ms"`
	MeanE2E  float64 `json:"e2e_mean_ms"`
	HitRatio float64 `json:"hit_ratio"`
}

// health is how far a run in real time can be believed.
type health struct {
	// Failed is how many requests had no whole answer; they are in no figure.
	Failed int `json:"failed"`
	// Error is that of one of them.
	Error string `json:"error,omitempty"`
	// Late are the median, the 99th percentile and the maximum of how late the client
	// sent its requests, in real ms.
	Late [3]float64 `json:"late_ms"`
	// Lag is the most that a step of an engine came too late, in ms of its time.
	Lag float64 `json:"engine_lag_ms"`
	// Cores is the mean number of processors that client, Caddy and engines kept busy.
	Cores float64 `json:"cores"`
	// Stall is the most that anything came too late, a request or a step, in ms of the
	// engines' time.
	Stall float64 `json:"stall_ms"`
	// Runs is how many runs were made until one had no long stall. This one is the one
	// with the shortest.
	Runs int `json:"runs"`
	// Seconds is how long the run took.
	Seconds float64 `json:"seconds"`
}

// result is one policy in real and in virtual time.
type result struct {
	Policy string  `json:"policy"`
	Live   figures `json:"live"`
	health
	Replay      figures   `json:"replay"`
	Spread      float64   `json:"replay_ttft_mean_spread"`
	Predictions *accuracy `json:"predictions"`
}

// stalled is the stall, in ms of the engines' time, that is too long to believe a run.
const stalled = 250

// live replays the cell in real time, and again if the machine stalled, so many times at
// most.
func (c *cell) live(ctx context.Context, r *result, runs int, progress func() func(ended int)) error {
	var best *result
	for n := range runs {
		next := &result{Policy: r.Policy, Replay: r.Replay, Spread: r.Spread}
		if err := c.once(ctx, next, progress()); err != nil {
			return err
		}
		if best == nil || next.Stall < best.Stall {
			best = next
		}
		if best.Runs = n + 1; best.Stall <= stalled {
			break
		}
	}
	*r = *best
	return nil
}

// once replays the cell in real time.
func (c *cell) once(ctx context.Context, r *result, progress func(ended int)) error {
	cl, err := c.startRouter(r.Policy)
	if err != nil {
		return err
	}
	defer cl.Stop()
	ended := make(chan struct{}, len(c.slice.Requests))
	cli := newClient(cl.url, c, func() { ended <- struct{}{} })
	begun, used := time.Now(), cpu()
	over := make(chan struct{})
	go func() {
		defer close(over)
		cli.replay(ctx)
	}()
	for n := 0; over != nil; {
		select {
		case <-ended:
			n++
			progress(n)
		case <-over:
			over = nil
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.Seconds = time.Since(begun).Seconds()
	r.Cores = (cpu() - used).Seconds() / r.Seconds
	r.Lag = milliseconds(cl.Lag())
	predicted, err := readPredictions(cl.log)
	if err != nil {
		return err
	}
	r.count(c, cl, cli, predicted)
	if r.Live.Requests == 0 {
		return fmt.Errorf("no request was answered: %s", r.Error)
	}
	return nil
}

// count makes the figures of a run.
func (r *result) count(c *cell, cl *router, cli *client, predicted predictions) {
	dials := make(map[string]string)
	for _, e := range cl.Engines {
		dials[e.Name()] = e.Addr()
	}
	// Predictions are taken in the order of the choices.
	slices.SortFunc(cli.shots, func(a, b shot) int { return a.sent.Compare(b.sent) })
	from := cli.zero.Add(time.Duration(float64(c.warmUp) * c.scale))
	f := &r.Live
	var ttft, late []float64
	var pairs []pair
	prompt, cached := 0, 0
	for i := range cli.shots {
		s := &cli.shots[i]
		if s.err != nil {
			r.Failed++
			r.Error = s.err.Error()
			continue
		}
		prediction, known := predicted.take(dials[s.engine], s.prompt)
		if s.sent.Before(from) {
			continue
		}
		took := milliseconds(s.first.Sub(s.sent)) / c.scale
		ttft, late = append(ttft, took), append(late, milliseconds(s.sent.Sub(s.due)))
		f.MeanTTFT += took
		f.MeanE2E += milliseconds(s.end.Sub(s.sent)) / c.scale
		prompt, cached = prompt+s.prompt, cached+s.cached
		if known {
			pairs = append(pairs, pair{prediction / c.scale, took})
		}
	}
	f.Requests = len(ttft)
	n := float64(max(1, len(ttft)))
	f.MeanTTFT, f.MeanE2E = f.MeanTTFT/n, f.MeanE2E/n
	slices.Sort(ttft)
	slices.Sort(late)
	f.P50TTFT, f.P99TTFT = quantile(ttft, 0.5), quantile(ttft, 0.99)
	f.HitRatio = float64(cached) / float64(max(1, prompt))
	r.Late = [3]float64{quantile(late, 0.5), quantile(late, 0.99), quantile(late, 1)}
	r.Stall = max(r.Late[2]/c.scale, r.Lag)
	r.Predictions = newAccuracy(pairs)
}

// take returns the next prediction for a placement.
func (p predictions) take(dial string, tokens int) (ms float64, ok bool) {
	at := placement{dial, tokens}
	list := p[at]
	if len(list) == 0 {
		return 0, false
	}
	p[at] = list[1:]
	return list[0], true
}

// replay replays the cell in virtual time.
func (c *cell) replay(r *result) error {
	results := make([]*sim.Result, 0, len(c.seeds))
	for _, seed := range c.seeds {
		res, err := sim.Run(sim.Config{
			Trace: c.slice, Policy: r.Policy, Cluster: c.cluster(), Speed: c.speed, Seed: seed, Sessions: c.keys, WarmUp: c.warmUp,
		})
		if err != nil {
			return fmt.Errorf("replaying with %s: %w", r.Policy, err)
		}
		results = append(results, res)
	}
	m := sim.Mean(results)
	r.Replay = figures{m.Requests, m.MeanTTFT, m.P50TTFT, m.P99TTFT, m.MeanE2E, m.HitRatio}
	r.Spread = m.Spread
	return nil
}

func (c *cell) cluster() sim.Cluster {
	return sim.Cluster{Workers: c.workers, KVTokens: []int64{c.kvTokens}}
}

func (c *cell) check() error {
	switch {
	case c.slice.BlockTokens < blockTokens:
		return fmt.Errorf("%s has blocks of %d tokens, want at least %d", c.slice.Name, c.slice.BlockTokens, blockTokens)
	case c.keys && !c.slice.Sessions:
		return errors.New("the trace has no sessions")
	}
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
