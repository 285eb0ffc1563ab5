package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	_ "github.com/caddy-kvrouter/kvrouter"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

const (
	engineCount = 4
	model       = "sim-70b"
	// The KV cache of each engine: their default, and what kv_router takes workers
	// to have unless it is told.
	kvTokens  = 262144
	blockSize = 16
)

// stepTimes are about a model of 70 billion parameters in FP8 on two H100, by
// arithmetic: 35 GB of weights to read on each for a step; 140 GFLOP for a token
// at 1.2 PFLOP/s; 2.6 MFLOP for a pair of tokens in attention; 160 kB of KV on
// each to read for a token of context. Beside the weights, about 80 GB are
// left for the KV cache.
var stepTimes = engine.StepModel{Base: 15, PerToken: 0.12, Attention: 2.2e-6, DecodeContext: 5e-5}

// cluster is engines with a Caddy before them.
type cluster struct {
	engines []*engine.Engine
	addr    string // of Caddy
	admin   string // of its admin endpoint; empty: there is none
	dir     string
}

// directive returns the line of a Caddyfile that proxies to some addresses.
type directive func(addrs string) string

func kvRouter(addrs string) string { return "kv_router " + addrs }

// reverseProxy is Caddy's own, with one of its policies.
func reverseProxy(policy string) directive {
	return func(addrs string) string {
		return "reverse_proxy " + addrs + " {\n\t\tlb_policy " + policy + "\n\t}"
	}
}

// startCluster starts new engines and a Caddy. There can be one at a time. With
// admin, Caddy has an admin endpoint and writes warnings to standard error.
func startCluster(d directive, speed float64, admin bool) (*cluster, error) {
	dir, err := os.MkdirTemp("", "kvrouter-demo-")
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir}
	if err := c.start(d, speed, admin); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *cluster) start(d directive, speed float64, admin bool) error {
	addrs := make([]string, engineCount)
	for i := range addrs {
		e, err := engine.Start(engine.Config{
			Name: fmt.Sprintf("e%d", i+1), Model: model, Speed: speed, Step: stepTimes,
			BlockSize: blockSize, Blocks: kvTokens / blockSize, AnswerTokens: chats.answer.most,
		})
		if err != nil {
			return err
		}
		c.engines = append(c.engines, e)
		addrs[i] = e.Addr()
	}
	var err error
	if c.addr, err = freeAddr(); err != nil {
		return err
	}
	if admin {
		if c.admin, err = freeAddr(); err != nil {
			return err
		}
	}
	cfg, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(c.caddyfile(d(strings.Join(addrs, " ")))), nil)
	if err != nil {
		return fmt.Errorf("adapting the Caddyfile: %w", err)
	}
	if err := caddy.Load(cfg, true); err != nil {
		return fmt.Errorf("starting Caddy: %w", err)
	}
	return nil
}

func (c *cluster) caddyfile(site string) string {
	// A log that goes elsewhere would first say so on standard error.
	admin, level := "off", "PANIC"
	if c.admin != "" {
		admin, level = c.admin, "WARN"
	}
	return fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	default_bind 127.0.0.1
	storage file_system %q
	log default {
		output stderr
		level %s
	}
	servers {
		protocols h1
	}
}
http://%s {
	%s
}
`, admin, c.dir, level, c.addr, site)
}

// url returns the base URL of the API, without a slash at the end.
func (c *cluster) url() string { return "http://" + c.addr + "/v1" }

func (c *cluster) stop() {
	caddy.Stop() //nolint:errcheck // the process or the next Caddy ends what is left
	for _, e := range c.engines {
		e.Close()
	}
	os.RemoveAll(c.dir) //nolint:errcheck,gosec // it is in the temp dir
}

// lag returns the most that a step came too late in the engines' present lives, in
// their time.
func (c *cluster) lag() time.Duration {
	most := 0.0
	for _, e := range c.engines {
		for _, k := range e.State().Ranks {
			most = max(most, k.LagMS)
		}
	}
	return milliseconds(most)
}

// freeAddr returns a loopback address that nothing listens on.
func freeAddr() (string, error) {
	ln, err := canned.Listen()
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
