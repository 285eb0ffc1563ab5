// Command bench measures what a router costs per request: CPU time, throughput and
// latency. It runs each contender beside plain Caddy in the same round, on one machine
// and over loopback. The upstreams answer at once, so the figures are the router's and
// not an engine's. The bench does not look at how well a router places requests.
//
// README.md beside this file says how to run it and how to read it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if isMock(os.Args[1:]) {
		if err := serveMock(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "bench, upstreams:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A first interrupt ends the measurement and has the report written, a
	// second one ends the program.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	contenders []*contender
	cells      []cell
	rounds     int
	warmup     time.Duration
	timed      time.Duration
	caddy      string
	profile    string
	base       string // the contender whom the ratios are to
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{base: baseline}
	all := builtin()
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	contenders := f.String("contenders", "", "comma-separated `names`; default: all of "+names(all)+", and those of -with")
	cells := f.String("cells", "", "comma-separated `names`; default: all of "+names(allCells()))
	f.IntVar(&o.rounds, "rounds", 3, "rounds, each with all cells and contenders")
	f.DurationVar(&o.warmup, "warmup", 500*time.Millisecond, "warm-up of each contender in each cell")
	f.DurationVar(&o.timed, "time", 2500*time.Millisecond, "what is timed of it")
	f.StringVar(&o.caddy, "caddy", "", "Caddy `binary` with kv_router; default: ./cmd/caddy is built")
	f.StringVar(&o.profile, "profile", "", "write CPU profiles of the Caddys to `directory`; profiling costs CPU time itself")
	f.Func("before", "another Caddy `binary` with kv_router, configured alike; the ratios are to it", func(binary string) error {
		binary, err := filepath.Abs(binary)
		o.base = "before"
		all = append(all, &contender{name: o.base, directive: router, binary: binary})
		return err
	})
	f.Func("with", "a further router, `name=port=command`; can be given several times, see README.md", func(s string) error {
		c, err := external(s, all)
		all = append(all, c)
		return err
	})
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 || o.rounds < 1 || o.timed <= 0 || o.warmup < 0 {
		return nil, fmt.Errorf("not understood: %s", strings.Join(args, " "))
	}
	var err error
	if o.contenders, err = pick(all, *contenders); err != nil {
		return nil, fmt.Errorf("contenders: %w", err)
	}
	if o.cells, err = pick(allCells(), *cells); err != nil {
		return nil, fmt.Errorf("cells: %w", err)
	}
	return o, nil
}

func (c cell) String() string       { return c.name }
func (c *contender) String() string { return c.name }

// names returns a list of the names.
func names[T fmt.Stringer](all []T) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(all), "[]"), " ", ", ")
}

// pick returns those of all that a comma-separated list names, in its order.
func pick[T fmt.Stringer](all []T, list string) (picked []T, err error) {
	if list == "" {
		return all, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		i := slices.IndexFunc(all, func(x T) bool { return x.String() == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("there is no %q", name)
		}
		picked = append(picked, all[i])
	}
	return picked, nil
}

// run is the whole program. The tables go to stdout, progress to stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	// The client's own garbage must not be what is measured.
	debug.SetGCPercent(400)
	dir, err := os.MkdirTemp("", "kvrouter-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if o.caddy == "" {
		o.caddy, err = buildCaddy(ctx, dir)
	} else {
		o.caddy, err = filepath.Abs(o.caddy)
	}
	if err != nil {
		return err
	}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o750); err != nil {
			return err
		}
	}
	m := &meter{options: o, log: stderr, dir: dir}
	m.seq.Store(firstNumber)
	var stop func()
	if m.upstreams, stop, err = startUpstreams(); err != nil {
		return fmt.Errorf("starting upstreams: %w", err)
	}
	defer stop()
	incomplete := m.measure(ctx)
	return errors.Join(incomplete, m.write(stdout, incomplete))
}

// meter takes the samples.
type meter struct {
	*options
	log       io.Writer
	dir       string
	upstreams []string
	seq       atomic.Int64 // the last request's number
	samples   []*sample
}

// measure runs all rounds. An interrupt and a contender that has ended end them early.
func (m *meter) measure(ctx context.Context) error {
	for round := range m.rounds {
		if err := m.measureRound(ctx, round); err != nil {
			return fmt.Errorf("in round %d: %w", round+1, err)
		}
	}
	return nil
}

// measureRound starts all contenders anew: of two processes of one program, one may take 10 % more CPU
// time for all of its life. Contenders take turns within a cell, so that what disturbs the machine for
// a while disturbs all of them. Their order is random, so that none always follows the same one.
func (m *meter) measureRound(ctx context.Context, round int) error {
	for _, con := range m.contenders {
		if err := con.start(ctx, m.caddy, m.dir, m.upstreams); err != nil {
			return fmt.Errorf("starting %s: %w", con.name, err)
		}
		defer con.proc.Stop()
	}
	for _, c := range m.cells {
		made := make(map[traffic]*corpus)
		for _, k := range rand.Perm(len(m.contenders)) { //nolint:gosec // an order is no secret
			con := m.contenders[k]
			s, err := m.sample(ctx, con, c, round, newLoad(con, c, made, &m.seq))
			if err != nil {
				return fmt.Errorf("cell %s: %w", c.name, err)
			}
			m.samples = append(m.samples, s)
			fmt.Fprintf(m.log, "round %d %-14s %-20s %8.0f req/s %8s ms CPU/req, p50 %8s ms, %d errors\n",
				round+1, c.name, con.name, s.rate, digits(s.cpu), digits(s.p50), s.errors)
		}
	}
	return nil
}
