// Command demo compares kv_router with Caddy's own reverse_proxy in a minute, with Go
// alone:
//
//	go run ./tests/demo
//
// It plays six workloads through five contenders: round_robin, least_conn and a
// sticky header of reverse_proxy, and kv_router without and with session ids. Each
// run has four simulated engines of its own (package engine) and a site of a real
// Caddy in this process. All runs of all seeds are played at the same moment with the
// same arrivals. So other work on this machine hits all contenders alike.
//
// The engines run faster than real ones. All times in the report are the engines':
// real time multiplied by the speed. The time that this machine takes is multiplied
// too; the report says how much that is.
//
// reverse_proxy has the options that an operator adds for engines that die or close idle
// connections: lb_retries, fail_duration and keepalive. kv_router has its defaults.
//
// The demo has limits. The caches hold all that is asked, so nothing shows how
// contenders cope with eviction. Most answers are short. A step of the engines takes what a
// formula says, not what a GPU takes.
//
// -with 'name=command' adds another router, which a shell starts once for each run. The command
// has placeholders: {listen}, {host} and {port} for the address to listen on, {upstreams} for
// the engines' base URLs with spaces between them. Requests to it have the session's id in the
// header X-Session-Id. peers.sh installs two such routers and runs the demo with them.
//
// -full plays workloads three times as long.
//
// -routers compares two and four routers, which share by a Valkey or Redis server or not, with
// one. Each is a process. It plays chat and shared documents, without session ids.
//
// -engines host:port,... compares round_robin and kv_router before engines that run
// already. Runs come one after another, and no engine dies. The number of sessions is
// in proportion to the number of engines. -speed is 1 by default. The engines must
// report cached tokens, and take prompts of 60 kB.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
)

// options is the command line.
type options struct {
	seed  uint64 // the first one
	seeds int
	speed float64
	given []string // engines that run already, host:port; empty: the demo starts its own
	model string   // that these serve

	routers bool // compare several routers with one
	full    bool // longer workloads
	with    []contender
	svg     string // a file for the picture; empty: none
}

// quickSpeed is how much faster than real the simulated engines run by default.
const quickSpeed = 3

// limit bounds all runs before simulated engines, in real time. fullLimit does so with -full.
const (
	limit     = 54 * time.Second
	fullLimit = 280 * time.Second
)

// threads is the least number of threads that run Go code. The machine's own work adds
// time to the mean TTFT. On two cores that were busy with other work, 2 threads added
// seconds and 64 threads some hundredths of a second.
const threads = 64

func parse(args []string) (*options, error) {
	o := new(options)
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.Uint64Var(&o.seed, "seed", 0, "the first of the seeds that decide on the workloads (default by chance)")
	fs.Float64Var(&o.speed, "speed", 0, "how many times faster than real the engines run, up to 100 (default 3, with -engines 1)")
	fs.IntVar(&o.seeds, "seeds", 3, "how many seeds")
	fs.Func("engines", "compare before engines that run already, `host:port,...`, one contender at a time", func(s string) error {
		o.given = strings.Split(s, ",")
		return nil
	})
	fs.BoolVar(&o.routers, "routers", false, "compare several routers with one, with the first two workloads")
	fs.BoolVar(&o.full, "full", false, "workloads three times as long")
	fs.StringVar(&o.svg, "svg", "", "draw a picture into this `file`")
	fs.Func("with", "compare another router, too: `name=command`, with {listen} and {upstreams} in the command; repeatable", func(s string) error {
		c, err := external(s)
		o.with = append(o.with, c)
		return err
	})
	fs.StringVar(&o.model, "model", model, "with -engines: the model that they serve")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 || o.speed < 0 || o.speed > 100 || o.seeds < 1 {
		return nil, errors.New("the speed is from 0 to 100, there is a seed, and nothing may follow the flags")
	}
	if o.speed == 0 && o.given != nil {
		o.speed = 1
	}
	o.speed = cmp.Or(o.speed, quickSpeed)
	for o.seed == 0 {
		o.seed = rand.Uint64N(10000) //nolint:gosec // not a secret
	}
	return o, nil
}

func main() {
	if file := os.Getenv(childConfig); file != "" {
		fmt.Fprintln(os.Stderr, "demo:", cluster.Serve(file))
		os.Exit(1)
	}
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	debug.SetGCPercent(400) // the collector's time is lost to the runs
	runtime.GOMAXPROCS(max(threads, runtime.NumCPU()))
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	switch {
	case err != nil:
	case o.routers:
		err = o.playRouters(ctx, shapes[:2], os.Stdout, os.Stderr)
	case o.given != nil:
		_, err = o.playGiven(ctx, shapes, os.Stdout, os.Stderr)
	default:
		err = o.demo(ctx, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to cancel
	}
}

// demo plays all runs, reports on them and draws the picture.
func (o *options) demo(ctx context.Context, out, progress io.Writer) error {
	list := slices.Clone(shapes)
	if o.full {
		for i := range list {
			if list[i].window == 0 {
				list[i].turns = span{3 * list[i].turns.least, 3 * list[i].turns.most}
				continue
			}
			list[i].sessions, list[i].shared, list[i].window = 3*list[i].sessions, 3*list[i].shared, 3*list[i].window
		}
	}
	r, err := o.play(ctx, list, progress)
	if err != nil {
		return err
	}
	r.write(out)
	if o.svg == "" {
		return nil
	}
	f, err := os.Create(o.svg) //nolint:gosec // where the user wants it
	if err != nil {
		return err
	}
	return errors.Join(r.draw(f), f.Close())
}

// workloads returns those of a shape, one for each seed.
func (o *options) workloads(s shape) (list []*workload) {
	for i := range o.seeds {
		list = append(list, newWorkload(s, o.seed+uint64(i))) //nolint:gosec // not negative
	}
	return list
}

// play plays all contenders with the workloads.
func (o *options) play(ctx context.Context, list []shape, progress io.Writer) (*result, error) {
	began := time.Now()
	contenders := slices.Concat(contenders, o.with)
	var runs []*run
	table := make([][][]*run, len(list)) // by workload and contender
	for i, s := range list {
		table[i] = make([][]*run, len(contenders))
		for _, w := range o.workloads(s) {
			for j, c := range contenders {
				r := &run{contender: c, load: w, model: model}
				runs = append(runs, r)
				table[i][j] = append(table[i][j], r)
			}
		}
	}
	a, err := newArena(runs...)
	if err != nil {
		return nil, err
	}
	defer a.stop()
	if err = a.start(ctx, o.speed); err != nil {
		return nil, err
	}
	most := limit
	if o.full {
		most = fullLimit
	}
	for _, s := range list {
		fmt.Fprintf(progress, "%-17s %s\n", s.title, s.about)
	}
	fmt.Fprintf(progress, "%d runs at the same moment: %d workloads, %d contenders, %d seeds.\n", len(runs), len(list), len(contenders), o.seeds)
	if err = a.perform(ctx, most, o.speed, progress); err != nil {
		return nil, err
	}
	r := &result{options: *o}
	for _, lists := range table {
		var cells []*cell
		for _, runs := range lists {
			cells = append(cells, newCell(runs))
		}
		judge(cells)
		r.cells = append(r.cells, cells)
	}
	r.outside = overhead(r.cells)
	r.took = time.Since(began)
	return r, nil
}
