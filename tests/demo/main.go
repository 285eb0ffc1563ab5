// Command demo compares kv_router with Caddy's own reverse_proxy in a minute, with Go
// alone:
//
//	go run ./tests/demo
//
// It plays four workloads through five contenders: round_robin, least_conn and a
// sticky header of reverse_proxy, and kv_router without and with session ids. Each
// run has four simulated engines of its own (package engine) and a site of a real
// Caddy in this process. All runs of all seeds are played at the same moment with the
// same arrivals. So other work on this machine hits all contenders alike.
//
// The engines run faster than real ones. All times in the report are the engines':
// real time multiplied by the speed. The time that this machine takes is multiplied
// too; the report says how much that is.
//
// reverse_proxy has the options that an operator adds for engines that die: lb_retries
// and fail_duration. kv_router has its defaults.
//
// The demo has limits. The caches hold all that is asked, so nothing shows how
// contenders cope with eviction. Answers are short. A step of the engines takes what a
// formula says, not what a GPU takes.
//
// -with 'name=command' adds another router, which a shell starts once for each run.
// The command has placeholders, which are variables of its environment as well:
//
//	{listen}     LISTEN     the host:port to listen on, also {host} and {port}
//	{upstreams}  UPSTREAMS  the engines' base URLs, with spaces between them
//	{addresses}  ADDRESSES  the engines' host:port, with spaces between them
//
// Requests to it have the session's id in the header X-Session-Id.
//
// -engines host:port,... compares round_robin and kv_router before engines that run
// already. Runs come one after another, and no engine dies. The number of sessions is
// in proportion to the number of engines. -speed is 1 by default. The engines must
// report cached tokens, and take prompts of 60 kB.
//
// With -serve it starts engines and kv_router, and leaves the requests to you.
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
)

// options is the command line.
type options struct {
	svg    string // empty: no picture
	with   []contender
	serve  bool
	full   bool
	seed   uint64 // the first one
	seeds  int
	speed  float64
	length int           // times the workloads' sessions and window
	limit  time.Duration // of the runs, in real time
	given  []string      // engines that run already, host:port; empty: the demo starts its own
	model  string        // that these serve
}

// Speeds and seeds unless the command line says otherwise.
const (
	quickSpeed = 3
	fullSpeed  = 2
	serveSpeed = 1
	quickSeeds = 3
	fullSeeds  = 5
)

// threads is the least number of threads that run Go code. The machine's own work adds
// time to the mean TTFT. On two cores that were busy with other work, 2 threads added
// seconds and 64 threads some hundredths of a second.
const threads = 64

func parse(args []string) (*options, error) {
	o := new(options)
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.StringVar(&o.svg, "svg", "", "draw the picture into this `file`")
	fs.Func("with", "compare another router, too: `name=command`, with {listen} and {upstreams} in the command; repeatable", o.addRouter)
	fs.BoolVar(&o.serve, "serve", false, "start engines and kv_router, and stay up until interrupted")
	fs.BoolVar(&o.full, "full", false, "longer workloads, slower engines and more seeds: about five minutes")
	fs.Uint64Var(&o.seed, "seed", 0, "the first of the seeds that decide on the workloads (default by chance)")
	fs.Float64Var(&o.speed, "speed", 0, "how many times faster than real the engines run, up to 100 (default 3, with -full 2, with -serve 1)")
	fs.IntVar(&o.seeds, "seeds", 0, "how many seeds (default 3, with -full 5)")
	fs.Func("engines", "compare before engines that run already, `host:port,...`, one contender at a time", func(s string) error {
		o.given = strings.Split(s, ",")
		return nil
	})
	fs.StringVar(&o.model, "model", model, "with -engines: the model that they serve")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 || o.speed < 0 || o.speed > 100 || o.seeds < 0 {
		return nil, errors.New("the speed is from 0 to 100, the seeds are not negative, and nothing may follow the flags")
	}
	speed, seeds := float64(quickSpeed), quickSeeds
	o.length, o.limit = 1, 54*time.Second
	switch {
	case o.serve, o.given != nil:
		speed = serveSpeed
	case o.full:
		speed, seeds, o.length, o.limit = fullSpeed, fullSeeds, 5, 8*time.Minute
	}
	o.speed, o.seeds = cmp.Or(o.speed, speed), cmp.Or(o.seeds, seeds)
	for o.seed == 0 {
		o.seed = rand.Uint64N(10000) //nolint:gosec // not a secret
	}
	return o, nil
}

func (o *options) addRouter(s string) error {
	c, err := external(s, slices.Concat(contenders, o.with))
	if err == nil {
		o.with = append(o.with, c)
	}
	return err
}

func main() {
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
	case o.serve:
		err = serve(ctx, os.Stdout, o.speed)
	case o.given != nil:
		_, err = o.playGiven(ctx, shapes, os.Stdout, os.Stderr)
	default:
		err = demo(ctx, os.Stdout, os.Stderr, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to cancel
	}
}

// demo plays all runs and reports on them.
func demo(ctx context.Context, out, progress io.Writer, o *options) error {
	var picture *os.File
	if o.svg != "" {
		var err error
		if picture, err = os.Create(o.svg); err != nil { //nolint:gosec // where the user wants it
			return err
		}
		defer picture.Close()
	}
	list := shapes
	if o.length > 1 {
		list = longer(shapes, o.length)
	}
	r, err := o.play(ctx, list, progress)
	if err != nil {
		return err
	}
	r.write(out)
	if picture == nil {
		return nil
	}
	if err := errors.Join(r.draw(picture), picture.Close()); err != nil {
		return fmt.Errorf("drawing the picture: %w", err)
	}
	return nil
}

// longer returns workloads with more sessions and shared documents in a longer time.
func longer(list []shape, times int) []shape {
	list = slices.Clone(list)
	for i := range list {
		list[i].sessions *= times
		list[i].shared *= times
		list[i].window *= time.Duration(times)
	}
	return list
}

// play plays all contenders with the workloads.
func (o *options) play(ctx context.Context, list []shape, progress io.Writer) (*result, error) {
	began := time.Now()
	all := slices.Concat(contenders, o.with)
	runs := make([]*run, 0, len(list)*len(all)*o.seeds)
	table := make([][][]*run, len(list)) // by workload and contender
	for i, s := range list {
		table[i] = make([][]*run, len(all))
		for seed := range o.seeds {
			w := newWorkload(s, o.seed+uint64(seed)) //nolint:gosec // not negative
			for j, c := range all {
				r := &run{contender: c, load: w, model: model}
				runs = append(runs, r)
				table[i][j] = append(table[i][j], r)
			}
		}
	}
	a, err := newArena(runs, o.speed)
	if err != nil {
		return nil, err
	}
	defer a.stop()
	bounded, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	for _, s := range list {
		fmt.Fprintf(progress, "%-17s %s\n", s.title, s.about)
	}
	fmt.Fprintf(progress, "%d runs at the same moment: %d workloads, %d contenders, %d seeds.\n", len(runs), len(list), len(all), o.seeds)
	unfollow, unwatch := follow(progress, runs, o.speed), watch()
	a.play(bounded, o.speed)
	r := &result{options: *o, machine: machine{late: unwatch() * o.speed}}
	unfollow()
	if ctx.Err() != nil {
		return nil, errors.New("interrupted")
	}
	for _, lists := range table {
		var cells []*cell
		for _, runs := range lists {
			cells = append(cells, newCell(runs))
		}
		judge(cells)
		r.cells = append(r.cells, cells)
	}
	r.machine.outside = overhead(r.cells)
	r.machine.took = time.Since(began)
	return r, nil
}
