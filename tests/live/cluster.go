package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	replayed "github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
)

// model is the name of the served model.
const model = "sim"

// directives are the policies that can be compared: their names in the replay, and
// what they are in a Caddyfile.
var directives = map[string]string{
	"predicted_latency": "predicted_latency",
	"dynamo":            "dynamo",
	"dynamo_16":         "dynamo {\nprefill_load_scale 16\n}",
	"dynamo_agentic":    "dynamo {\npreset agentic\n}",
	"least_load":        "least_load",
	"round_robin":       "round_robin",
	"random":            "random",
	"power_of_two":      "power_of_two",
}

// router is engines with a Caddy in front of them.
type router struct {
	*cluster.Cluster
	url string
	log string // what the router logs, JSON lines
}

// startRouter starts workers and a Caddy with a policy. There can be one at a time.
func (c *cell) startRouter(policy string) (*router, error) {
	cl, err := cluster.New()
	if err != nil {
		return nil, err
	}
	r := &router{Cluster: cl, log: cl.File("router.log")}
	if err := r.start(c, policy); err != nil {
		r.Stop()
		return nil, err
	}
	return r, nil
}

func (r *router) start(c *cell, policy string) error {
	addrs := make([]string, c.workers)
	for i := range addrs {
		e, err := r.StartEngine(engineConfig(i, c))
		if err != nil {
			return err
		}
		addrs[i] = e.Addr()
	}
	addr, err := canned.FreeAddr()
	if err != nil {
		return err
	}
	r.url = "http://" + addr
	return r.Load(fmt.Sprintf(globals, r.log),
		fmt.Sprintf(site, addr, strings.Join(addrs, " "), directives[policy], c.slice.BlockTokens))
}

// engineConfig returns the simulator's configuration that makes it the replay's model.
func engineConfig(i int, c *cell) engine.Config {
	m := replayed.Default()
	blocks := int(c.kvTokens) / c.slice.BlockTokens
	return engine.Config{
		Name: fmt.Sprintf("e%d", i), Model: model, Speed: 1 / c.scale,
		BlockSize: c.slice.BlockTokens, Blocks: blocks, MaxModelLen: blocks * c.slice.BlockTokens,
		TokenBudget: m.Budget, MaxRunning: m.Budget, // the model has no bound of its own
		Step:      engine.StepModel{Base: m.Step, PerToken: m.Token, Attention: m.Attention, DecodeContext: m.Context},
		KeepAlive: time.Hour, JournalSize: 1,
	}
}

// globals are Caddy's global options. The debug lines of the router hold its
// predictions.
const globals = `
	admin off
	log default {
		output stderr
		level PANIC
	}
	log router {
		output file %q {
			roll_disabled
		}
		level DEBUG
		include http.handlers.kv_router
	}
`

// site makes the router compare the blocks of the trace, as the replay does.
const site = `http://%s {
	kv_router %s {
		policy %s
		index {
			block_size %d
		}
	}
}
`
