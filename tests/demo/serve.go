package main

import (
	"context"
	"fmt"
	"io"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
)

// serve starts engines and kv_router, prints their addresses, and waits until ctx
// ends.
func serve(ctx context.Context, out io.Writer, speed float64) error {
	c, err := cluster.New()
	if err != nil {
		return err
	}
	defer c.Stop()
	engines, addrs, err := startEngines(c, speed)
	if err != nil {
		return err
	}
	addr, err := canned.FreeAddr()
	if err != nil {
		return err
	}
	admin, err := canned.FreeAddr()
	if err != nil {
		return err
	}
	globals := fmt.Sprintf("\tadmin %s\n\tlog default {\n\t\toutput stderr\n\t\tlevel WARN\n\t}\n", admin)
	if err := c.Load(globals, fmt.Sprintf("http://%s {\n\t%s\n}\n", addr, kvRouter(addrs, "demo", speed))); err != nil {
		return err
	}
	fmt.Fprintf(out, "kv_router   http://%s/v1\nmetrics     http://%s/metrics\n", addr, admin)
	for _, e := range engines {
		fmt.Fprintf(out, "engine %s   %s   control %s/_engine/state\n", e.Name(), e.URL(), e.ControlURL())
	}
	fmt.Fprintf(out, `
Ask, twice. The second answer's usage has cached_tokens.

  curl http://%s/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model":%q,"max_tokens":20,"messages":[{"role":"user","content":"Tell me a long story about a cache that every request wanted to hit and about the router that knew where it was."}]}'

Kill an engine. It comes back after 10 s.

  curl -X POST '%s/_engine/restart?down=10s'

Ctrl-C ends it.
`, addr, model, engines[0].ControlURL())
	<-ctx.Done()
	return nil
}
