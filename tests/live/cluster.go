package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "github.com/caddy-kvrouter/kvrouter"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	replayed "github.com/caddy-kvrouter/kvrouter/tests/replay/engine"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
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

// cluster is engines with a Caddy before them.
type cluster struct {
	engines []*engine.Engine
	url     string
	log     string // what the router logs, JSON lines
	dir     string
}

// startCluster starts workers and a Caddy with a policy. There can be one at a time.
func (c *cell) startCluster(policy string) (*cluster, error) {
	dir, err := os.MkdirTemp("", "kvrouter-live-")
	if err != nil {
		return nil, err
	}
	cl := &cluster{dir: dir, log: filepath.Join(dir, "router.log")}
	if err := cl.start(c, policy); err != nil {
		cl.stop()
		return nil, err
	}
	return cl, nil
}

func (cl *cluster) start(c *cell, policy string) error {
	addrs := make([]string, c.workers)
	for i := range addrs {
		e, err := engine.Start(engineConfig(i, c))
		if err != nil {
			return err
		}
		cl.engines = append(cl.engines, e)
		addrs[i] = e.Addr()
	}
	ln, err := canned.Listen()
	if err != nil {
		return err
	}
	addr := ln.Addr().String()
	ln.Close()
	cl.url = "http://" + addr
	file := fmt.Sprintf(caddyfile, cl.dir, cl.log, addr, strings.Join(addrs, " "), directives[policy], c.slice.BlockTokens)
	cfg, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(file), nil)
	if err != nil {
		return fmt.Errorf("adapting the Caddyfile: %w", err)
	}
	if err := caddy.Load(cfg, true); err != nil {
		return fmt.Errorf("starting Caddy: %w", err)
	}
	return nil
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

// caddyfile has the router compare the blocks of the trace, as the replay does. The
// debug lines of the router have its predictions.
const caddyfile = `{
	admin off
	persist_config off
	auto_https off
	default_bind 127.0.0.1
	storage file_system %q
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
	servers {
		protocols h1
	}
}
http://%s {
	kv_router %s {
		policy %s
		index {
			block_size %d
		}
	}
}
`

func (cl *cluster) stop() {
	caddy.Stop() //nolint:errcheck // the process or the next Caddy ends what is left
	for _, e := range cl.engines {
		e.Close()
	}
	os.RemoveAll(cl.dir) //nolint:errcheck,gosec // it is in the temp dir
}

// lag returns the most that a step came too late, in the engines' time.
func (cl *cluster) lag() time.Duration {
	most := 0.0
	for _, e := range cl.engines {
		for _, k := range e.State().Ranks {
			most = max(most, k.LagMS)
		}
	}
	return time.Duration(most * float64(time.Millisecond))
}
