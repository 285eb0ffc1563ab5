// Package cluster runs simulated engines, and a Caddy in front of them, in this
// process. It is for programs that compare routers; package canned is enough for a
// test of one request.
package cluster

import (
	"fmt"
	"os"
	"path/filepath"

	_ "github.com/caddy-kvrouter/kvrouter" // so that Caddy has the directive
	"github.com/caddy-kvrouter/kvrouter/tests/engine"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// Cluster is engines with a Caddy in front of them. A process has one Caddy, so it
// runs one cluster at a time.
type Cluster struct {
	// Engines are the started engines, in the order of their start.
	Engines []*engine.Engine

	dir string
}

// New returns a cluster without engines and with a temporary directory. The caller
// must call Stop.
func New() (*Cluster, error) {
	dir, err := os.MkdirTemp("", "kvrouter-cluster-")
	if err != nil {
		return nil, err
	}
	return &Cluster{dir: dir}, nil
}

// File returns the path of a file in the temporary directory.
func (c *Cluster) File(name string) string { return filepath.Join(c.dir, name) }

// StartEngine starts one more engine.
func (c *Cluster) StartEngine(cfg engine.Config) (*engine.Engine, error) {
	e, err := engine.Start(cfg)
	if err != nil {
		return nil, err
	}
	c.Engines = append(c.Engines, e)
	return e, nil
}

// Load starts Caddy with global options and sites of a Caddyfile. The options that
// keep Caddy on the loopback and out of the user's files are always there.
func (c *Cluster) Load(options, sites string) error {
	if err := os.Setenv("XDG_DATA_HOME", c.dir); err != nil { // for the journals
		return err
	}
	cfg, err := Adapt(c.dir, options, sites)
	if err != nil {
		return err
	}
	if err := caddy.Load(cfg, true); err != nil {
		return fmt.Errorf("starting Caddy: %w", err)
	}
	return nil
}

// Adapt returns the configuration that [Cluster.Load] loads, for a Caddy with its data in dir.
func Adapt(dir, options, sites string) ([]byte, error) {
	file := fmt.Sprintf(`{
	persist_config off
	auto_https off
	default_bind 127.0.0.1
	storage file_system %q
	servers {
		protocols h1
	}
%s}
%s`, dir, options, sites)
	cfg, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(file), nil)
	if err != nil {
		return nil, fmt.Errorf("adapting the Caddyfile: %w", err)
	}
	return cfg, nil
}

// Serve runs a Caddy with the configuration in a file until a signal ends the process. The error is
// that of the start.
func Serve(file string) error {
	cfg, err := os.ReadFile(file) //nolint:gosec // the caller's
	if err != nil {
		return err
	}
	caddy.TrapSignals()
	if err := caddy.Load(cfg, true); err != nil {
		return err
	}
	select {}
}

// Stop stops Caddy and the engines, and removes the temporary directory.
func (c *Cluster) Stop() {
	caddy.Stop() //nolint:errcheck // the process or the next Caddy ends what is left
	for _, e := range c.Engines {
		e.Close()
	}
	os.RemoveAll(c.dir) //nolint:errcheck,gosec // it is in the temp dir
}
