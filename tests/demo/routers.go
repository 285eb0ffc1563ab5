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
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
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

// routers are the processes of a group.
type routers struct {
	group
	cmds []*exec.Cmd
}

// playRouters compares several routers with one. No request names its session.
func (o *options) playRouters(ctx context.Context, list []shape, out, progress io.Writer) error {
	v, err := valkey.Start()
	if err != nil {
		return err
	}
	defer v.Stop()
	c, err := cluster.New()
	if err != nil {
		return err
	}
	a := &arena{Cluster: c}
	defer a.Stop()
	loads := make([][]*workload, len(list))
	for i, s := range list {
		for seed := range o.seeds {
			loads[i] = append(loads[i], newWorkload(s, o.seed+uint64(seed))) //nolint:gosec // not negative
		}
	}
	runs := make([][][]*run, len(groups)) // by workload and seed
	for i, g := range groups {
		all := &routers{group: g}
		defer all.kill(0)
		for _, same := range loads {
			var row []*run
			for _, w := range same {
				row = append(row, &run{contender: contender{name: g.name}, load: w, model: model})
			}
			runs[i], a.runs = append(runs[i], row), append(a.runs, row...)
		}
		if err := all.start(a, runs[i], fmt.Sprint("group", i), v.URL(), o.speed); err != nil {
			return err
		}
		if g.killed {
			timer := time.AfterFunc(time.Duration(float64(window)/2/o.speed), func() { all.kill(g.routers - 1) })
			defer timer.Stop()
		}
	}
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	unfollow := follow(progress, a.runs, o.speed)
	a.play(bounded, o.speed)
	unfollow()
	if ctx.Err() != nil {
		return errors.New("interrupted")
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
func (g *routers) start(a *arena, runs [][]*run, name, share string, speed float64) error {
	sites := make([]strings.Builder, g.routers)
	for i, row := range runs {
		for k, r := range row {
			engines, addrs, err := startEngines(a.Cluster, r.load, speed, g.events)
			if err != nil {
				return err
			}
			r.engines = engines
			option := ""
			if g.share {
				option = "share " + share
			}
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
		if err := g.startOne(a.File(fmt.Sprint(name, "-", n)), sites[n].String()); err != nil {
			return err
		}
	}
	for _, row := range runs {
		for _, r := range row {
			if err := await(r.addrs); err != nil {
				return err
			}
		}
	}
	if g.share {
		time.Sleep(2 * time.Second) // until they know each other
	}
	return nil
}

// startOne starts one router, with its data in a directory.
func (g *routers) startOne(dir, sites string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	cfg, err := cluster.Adapt(dir, quiet, sites)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "caddy.json")
	if err := os.WriteFile(file, cfg, 0o600); err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), childConfig+"="+file, "XDG_DATA_HOME="+dir)
	cmd.Stderr = os.Stderr
	g.cmds = append(g.cmds, cmd)
	return cmd.Start()
}

// kill kills all routers from one on.
func (g *routers) kill(from int) {
	for _, cmd := range g.cmds[min(from, len(g.cmds)):] {
		if cmd.Process != nil {
			_ = cmd.Process.Kill() //nolint:errcheck // it may be over
			_ = cmd.Wait()         //nolint:errcheck // the same
		}
	}
}

// await waits until there are servers at the addresses.
func await(addrs []string) error {
	for _, addr := range addrs {
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			conn, err := net.Dial("tcp", addr) //nolint:noctx // on loopback
			if err == nil {
				_ = conn.Close() //nolint:errcheck // nothing was written
				break
			}
			if time.Now().After(end) {
				return err
			}
		}
	}
	return nil
}
