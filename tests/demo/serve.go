package main

import (
	"context"
	"fmt"
	"io"
)

// serve starts engines and kv_router, says where they are, and waits until ctx
// ends.
func serve(ctx context.Context, out io.Writer, speed float64) error {
	c, err := startCluster(kvRouter, speed, true)
	if err != nil {
		return err
	}
	defer c.stop()
	fmt.Fprintf(out, "kv_router   %s\nmetrics     http://%s/metrics\n", c.url(), c.admin)
	for _, e := range c.engines {
		fmt.Fprintf(out, "engine %s   %s   control %s/_engine/state\n", e.Name(), e.URL(), e.ControlURL())
	}
	fmt.Fprintf(out, `
Ask, twice: the second answer's usage has cached_tokens.

  curl %s/chat/completions -H 'Content-Type: application/json' \
    -d '{"model":%q,"max_tokens":20,"messages":[{"role":"user","content":"Tell me a story about a cache that everybody wanted to have, and of the one who knew where it was."}]}'

Kill an engine, and have it come back after 10 s:

  curl -X POST '%s/_engine/restart?down=10s'

Ctrl-C ends it.
`, c.url(), model, c.engines[0].ControlURL())
	<-ctx.Done()
	return nil
}
