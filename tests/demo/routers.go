package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/process"
	"github.com/caddy-kvrouter/kvrouter/tests/valkey"
)

// group is routers that get requests in rotation, each a process of its own.
type group struct {
	name    string
	routers int
	share   bool
	killed  bool // one of them, in the middle
	events  bool // the engines publish KV events
}

var groups = []group{
	{name: "1 router", routers: 1},
	{name: "2 routers, share", routers: 2, share: true},
	{name: "4 routers, share", routers: 4, share: true},
	{name: "4, one is killed", routers: 4, share: true, killed: true},
	{name: "2 routers alone", routers: 2},
	{name: "4 routers alone", routers: 4},
	{name: "1 router, events", routers: 1, events: true},
	{name: "2 alone, events", routers: 2, events: true},
	{name: "4 alone, events", routers: 4, events: true},
}

// childConfig names the configuration of a Caddy that this program runs in place of the demo.
const childConfig = "KV_ROUTER_DEMO_CADDY"

// playRouters compares several routers with one. No request names its session.
func (o *options) playRouters(ctx context.Context, list []shape, out, progress io.Writer) error {
	v, err := valkey.Start()
	if err != nil {
		return err
	}
	defer v.Stop()
	a, err := newArena()
	if err != nil {
		return err
	}
	defer a.stop()
	var loads [][]*workload
	for _, s := range list {
		loads = append(loads, o.workloads(s))
	}
	runs := make([][][]*run, len(groups)) // by workload and seed
	for i, g := range groups {
		for _, same := range loads {
			var row []*run
			for _, w := range same {
				row = append(row, &run{contender: contender{name: g.name}, load: w, model: model})
			}
			runs[i], a.runs = append(runs[i], row), append(a.runs, row...)
		}
		if err := g.start(ctx, a, runs[i], fmt.Sprint("group", i), v.URL(), o.speed); err != nil {
			return err
		}
		if g.killed {
			timer := time.AfterFunc(time.Duration(float64(window)/2/o.speed), a.processes[len(a.processes)-1].Kill)
			defer timer.Stop()
		}
	}
	if err := a.perform(ctx, limit, o.speed, progress); err != nil {
		return err
	}
	what := "a Valkey or Redis server"
	if !v.Real {
		what = "a server in this process, which stands for one"
	}
	fmt.Fprintf(out, "Routers share by %s. %s. Median (least-most) of seeds %d to %d.\n", what, hardware, o.seed, o.seed+uint64(o.seeds)-1) //nolint:gosec // small
	for i, s := range list {
		fmt.Fprintf(out, "\n%-*s %17s %17s %17s %9s\n", nameWidth+2, s.title, "hit %", "mean TTFT s", "p99 TTFT s", "broken")
		for k := range groups {
			c, broken := newCell(runs[k][i]), 0
			for _, r := range runs[k][i] {
				broken += r.failed + r.broken
			}
			fmt.Fprintf(out, "  %-*s %17s %17s %17s %9d\n", nameWidth, c.name, times(c.hits), times(c.mean), times(c.p99), broken)
		}
	}
	return nil
}

// start starts engines for each run, and the group's routers in front of them.
func (g *group) start(ctx context.Context, a *arena, runs [][]*run, name, share string, speed float64) error {
	sites, option := make([]strings.Builder, g.routers), ""
	if g.share {
		option = "share " + share
	}
	for i, row := range runs {
		for k, r := range row {
			engines, addrs, err := startEngines(a.Cluster, r.load, speed, g.events)
			if err != nil {
				return err
			}
			r.engines = engines
			for n := range sites {
				addr, err := canned.FreeAddr()
				if err != nil {
					return err
				}
				r.addrs = append(r.addrs, addr)
				fmt.Fprintf(&sites[n], "http://%s {\n\tkv_router %s {\n\t\tpool %s-%d-%d\n\t\t%s\n\t}\n}\n", addr, strings.Join(addrs, " "), name, i, k, option)
			}
		}
	}
	for n := range sites {
		p, err := startRouter(a.File(fmt.Sprint(name, "-", n)), sites[n].String())
		if err != nil {
			return err
		}
		a.processes = append(a.processes, p)
		err = p.Await(ctx, 20*time.Second, func(ctx context.Context) (err error) {
			for _, r := range slices.Concat(runs...) {
				err = errors.Join(err, accepts(ctx, r.addrs[n]))
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if g.share {
		time.Sleep(2 * time.Second) // until they know each other
	}
	return nil
}

// startRouter starts one router, with its data in a directory.
func startRouter(dir, sites string) (*process.Process, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	cfg, err := cluster.Adapt(dir, quiet, sites)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "caddy.json")
	if err := os.WriteFile(file, cfg, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), childConfig+"="+file, "XDG_DATA_HOME="+dir)
	return process.Start(cmd, filepath.Join(dir, "output.log"))
}

// accepts returns an error if there is no server at an address.
func accepts(ctx context.Context, addr string) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}
