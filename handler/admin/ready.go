package admin

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/spf13/cobra"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Ready{})
	httpcaddyfile.RegisterHandlerDirective("kv_router_ready", parseReady)
	httpcaddyfile.RegisterDirectiveOrder("kv_router_ready", httpcaddyfile.Before, "respond")
}

// Ready is a handler that says whether the router is ready, for load balancers and probes. The answer is
// 200 if it is, else 503 with the reason as text. It is not while no worker can serve, while the journal
// of an earlier run is being read, and while Caddy shuts down. It needs no authentication.
type Ready struct {
	// The pool that must be ready. Default: any of them.
	Pool string `json:"pool,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Ready) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router_ready", New: func() caddy.Module { return new(Ready) }}
}

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (h Ready) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	err := ready(h.Pool)
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		if stops, _ := repl.Get("http.shutting_down"); stops == true {
			err = errors.New("the router shuts down")
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, err = fmt.Fprintf(w, "not ready: %v\n", err)
		return err
	}
	_, err = io.WriteString(w, "ready\n")
	return err
}

// ready returns why a pool cannot serve, or why none can if name is empty. It returns nil if it can.
func ready(name string) error {
	err := errors.New("there is no pool")
	if name != "" {
		err = fmt.Errorf("there is no pool %s", name)
	}
	for _, p := range sortedPools() {
		if name == "" || p.Name == name {
			if err = readyPool(p); err == nil {
				return nil
			}
		}
	}
	return err
}

// readyPool returns why a pool cannot serve; nil if it can. Workers of a dynamic source are not known
// before the first request, which may also wait for one.
func readyPool(p *pool.Pool) error {
	if p.Restores() {
		return errors.New("the journal is being read")
	}
	now, proxy, n := time.Now(), proxyOf(p), 0
	for _, w := range p.All() {
		s := w.Health.State(now)
		if yes := isAvailable(w, &s, proxy); yes != nil && *yes || w.Asleep() && w.Wakes() && !s.Away {
			return nil // without requests, nothing wakes an engine
		}
		n++
	}
	if n == 0 && p.Settings.Load().Others {
		return nil
	}
	return errors.New("no worker can serve")
}

func getReady(r *http.Request) (any, error) {
	if err := ready(r.URL.Query().Get("pool")); err != nil {
		return nil, apiError(http.StatusServiceUnavailable, "not ready: %w", err)
	}
	return readyView{true}, nil
}

type readyView struct {
	Ready bool `json:"ready"`
}

func readyCommand() *cobra.Command {
	cmd := command("ready", "Says whether a worker can serve, for health checks", cobra.NoArgs, func(c *client, fl caddycmd.Flags) (int, error) {
		uri := "/kv_router/ready"
		if fl.Changed("pool") {
			uri += "?pool=" + c.pool
		}
		resp, err := c.do(http.MethodGet, uri, nil, nil)
		if err != nil {
			return exitFailed, err
		}
		fmt.Println("ready")
		return exitOK, resp.Body.Close()
	})
	cmd.Long = `Ends with code 0 if a worker of any pool can serve, or of that of --pool, and
with code 1 if none can. A failing worker does not matter if another one can serve.`
	return cmd
}

// parseReady reads the directive:
//
//	kv_router_ready [<matcher>] [<pool>]
func parseReady(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	name, err := parsePool(h)
	return &Ready{name}, err
}

func parsePool(h httpcaddyfile.Helper) (name string, err error) {
	h.Next() // the directive's name
	directive := h.Val()
	if h.NextArg() {
		name = h.Val()
	}
	if h.NextArg() || h.NextBlock(0) {
		err = fmt.Errorf("%s: takes one pool at most: %w", directive, h.ArgErr())
	}
	return name, err
}

// Interface guard
var _ caddyhttp.MiddlewareHandler = Ready{}
