package main

import (
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	engineCount = 4 // of each run
	model       = "sim-70b"
	kvTokens    = 88000 // that each engine's KV cache holds
	blockSize   = 16
)

// hardware is what the engines are, for the report.
const hardware = "70B INT4 on an A100 (1,280 prompt tokens/s)"

// stepTimes are computed for a model of 70 billion parameters in INT4 on one A100 of
// 80 GB. The KV cache has 28 GB. A step takes:
//
//   - 38 GB of weights to read
//   - 140 GFLOP for each token, at 180 TFLOP/s
//   - 2.6 MFLOP for each pair of tokens in attention
//   - 320 kB of KV to read for each token of context
var stepTimes = engine.StepModel{Base: 24, PerToken: 0.78, Attention: 1.4e-5, DecodeContext: 2e-4}

// startEngines starts the engines of one run and returns their addresses.
func startEngines(c *cluster.Cluster, speed float64) ([]*engine.Engine, []string, error) {
	engines, addrs := make([]*engine.Engine, engineCount), make([]string, engineCount)
	for i := range engines {
		e, err := c.StartEngine(engine.Config{
			Name: fmt.Sprintf("e%d", i+1), Model: model, Speed: speed, Step: stepTimes,
			BlockSize: blockSize, Blocks: kvTokens / blockSize,
		})
		if err != nil {
			return nil, nil, err
		}
		engines[i], addrs[i] = e, e.Addr()
	}
	return engines, addrs, nil
}

// arena is all runs: each has its own engines, and one Caddy has a site for each.
type arena struct {
	*cluster.Cluster
	runs []*run
}

// newArena starts engines and routers of all runs.
func newArena(runs []*run, speed float64) (*arena, error) {
	c, err := cluster.New()
	if err != nil {
		return nil, err
	}
	a := &arena{Cluster: c, runs: runs}
	if err := a.start(speed); err != nil {
		a.Stop()
		return nil, err
	}
	return a, nil
}

// quiet are Caddy's global options: no admin endpoint and no log.
const quiet = `
	admin off
	log default {
		output stderr
		level PANIC
	}
`

func (a *arena) start(speed float64) error {
	var sites strings.Builder
	for i, r := range a.runs {
		engines, addrs, err := startEngines(a.Cluster, speed)
		if err != nil {
			return err
		}
		addr, err := canned.FreeAddr()
		if err != nil {
			return err
		}
		r.engines, r.addrs = engines, []string{addr}
		fmt.Fprintf(&sites, "http://%s {\n\t%s\n}\n", addr, r.route(addrs, fmt.Sprint("run", i), speed))
	}
	return a.Load(quiet, sites.String())
}
