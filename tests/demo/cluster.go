package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/process"
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

// slowdown is how much longer a slow engine takes for a step.
const slowdown = 3

// startEngines starts the engines for a workload and returns their addresses.
func startEngines(c *cluster.Cluster, w *workload, speed float64, events bool) ([]*engine.Engine, []string, error) {
	engines, addrs := make([]*engine.Engine, engineCount), make([]string, engineCount)
	for i := range engines {
		step := stepTimes
		if w.slow && i == 0 {
			step = engine.StepModel{
				Base: slowdown * step.Base, PerToken: slowdown * step.PerToken,
				Attention: slowdown * step.Attention, DecodeContext: slowdown * step.DecodeContext,
			}
		}
		cfg := engine.Config{
			Name: fmt.Sprintf("e%d", i+1), Model: model, Speed: speed, Step: step,
			BlockSize: blockSize, Blocks: kvTokens / blockSize,
		}
		if events {
			cfg.Events = new(engine.EventConfig)
		}
		e, err := c.StartEngine(cfg)
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
	runs      []*run
	processes []*process.Process
}

func newArena(runs ...*run) (*arena, error) {
	c, err := cluster.New()
	return &arena{Cluster: c, runs: runs}, err
}

// quiet are Caddy's global options: no admin endpoint and no log.
const quiet = `
	admin off
	log default {
		output stderr
		level PANIC
	}
`

// start starts engines and routers of all runs, the engines first. A free address is only a promise
// until the router listens there, and no engine may take it meanwhile.
func (a *arena) start(ctx context.Context, speed float64) error {
	behind := make([][]string, len(a.runs))
	for i, r := range a.runs {
		var err error
		if r.engines, behind[i], err = startEngines(a.Cluster, r.load, speed, false); err != nil {
			return err
		}
	}
	var sites strings.Builder
	promised := make(map[string]bool)
	others := make(map[string]*process.Process) // by address
	for i, r := range a.runs {
		addr, err := freeAddr(promised)
		if err != nil {
			return err
		}
		r.addrs = []string{addr}
		if r.command == "" {
			fmt.Fprintf(&sites, "http://%s {\n\t%s\n}\n", addr, r.route(behind[i], fmt.Sprint("run", i), speed))
			continue
		}
		p, err := startProcess(r.command, addr, behind[i], a.File(fmt.Sprint("run", i)))
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		others[addr], a.processes = p, append(a.processes, p)
	}
	for addr, p := range others {
		if err := p.Await(ctx, patience, func(ctx context.Context) error { return listsModels(ctx, addr) }); err != nil {
			return err
		}
	}
	if err := a.Load(quiet, sites.String()); err != nil {
		return err
	}
	for _, r := range a.runs { // as a load balancer asks a router before clients come
		if err := listsModels(ctx, r.addrs[0]); err != nil {
			return err
		}
	}
	return nil
}

// freeAddr returns a free address that is not among those promised, and adds it to them. The
// ports of a process begin again after the last one.
func freeAddr(promised map[string]bool) (string, error) {
	for range 2000 {
		addr, err := canned.FreeAddr()
		if err != nil || !promised[addr] {
			promised[addr] = true
			return addr, err
		}
	}
	return "", errors.New("all ports of this process are taken: play fewer runs")
}

func (a *arena) stop() {
	for _, p := range a.processes {
		p.Kill()
	}
	a.Stop()
}
