// Command bench measures what a router costs per request: CPU time, throughput,
// latency and memory. It runs each contender beside plain Caddy in the same
// round, on one machine and over loopback. The upstreams answer at once, so the
// figures are the router's and not an engine's. The bench does not look at how
// well a router places requests.
//
// README.md beside this file says how to run it and how to read it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if child, err := runChild(os.Args[1:]); child {
		if err != nil {
			fmt.Fprintln(os.Stderr, os.Args[1]+":", err)
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
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// runChild does the work of one of this program's own processes, if the
// arguments are those of one.
func runChild(args []string) (child bool, err error) {
	if len(args) != 1 {
		return false, nil
	}
	switch args[0] {
	case mockCommand:
		return true, serveMock(os.Stdin, os.Stdout)
	case watchdogCommand:
		return true, watchOver(os.Stdin)
	}
	return false, nil
}

// options are the command line.
type options struct {
	contenders []*contender
	cells      []cell
	rounds     int
	warmup     time.Duration
	timed      time.Duration
	caddy      string
	json       string
	profile    string
	markdown   bool
}

// list is a flag that is given several times.
type list []string

// String implements flag.Value.
func (l *list) String() string { return strings.Join(*l, "\n") }

// Set implements flag.Value.
func (l *list) Set(s string) error {
	*l = append(*l, s)
	return nil
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := new(options)
	var with list
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	names := f.String("contenders", "", "comma-separated `names`; default: all of "+strings.Join(contenderNames(builtin()), ", ")+", and those of -with")
	cellNames := f.String("cells", "", "comma-separated `names`; default: all of "+strings.Join(namesOfCells(allCells()), ", "))
	f.IntVar(&o.rounds, "rounds", 3, "rounds, each with all cells and contenders")
	f.DurationVar(&o.warmup, "warmup", 500*time.Millisecond, "warm-up of each contender in each cell")
	f.DurationVar(&o.timed, "time", 2500*time.Millisecond, "what is timed of it")
	f.StringVar(&o.caddy, "caddy", "", "Caddy `binary` with kv_router; default: ./cmd/caddy is built")
	f.StringVar(&o.json, "json", "", "write all samples to `file`")
	f.StringVar(&o.profile, "profile", "", "write CPU profiles of the Caddys to `directory`; profiling costs CPU time itself")
	f.BoolVar(&o.markdown, "md", false, "write the tables in Markdown")
	f.Var(&with, "with", "a further router, `name=port=command`; can be given several times, see README.md")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 || o.rounds < 1 || o.timed <= 0 || o.warmup < 0 {
		return nil, fmt.Errorf("not understood: %s", strings.Join(args, " "))
	}
	all := builtin()
	for _, w := range with {
		c, err := external(w)
		if err != nil {
			return nil, err
		}
		if err := checkName(c.name, all); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	var err error
	if o.contenders, err = pick(all, *names, func(c *contender) string { return c.name }); err != nil {
		return nil, fmt.Errorf("contenders: %w", err)
	}
	if o.cells, err = pick(allCells(), *cellNames, func(c cell) string { return c.name }); err != nil {
		return nil, fmt.Errorf("cells: %w", err)
	}
	return o, nil
}

// pick returns those of all that a comma-separated list names, in its order,
// each at most once.
func pick[T any](all []T, names string, name func(T) string) ([]T, error) {
	if names == "" {
		return all, nil
	}
	var picked []T
	seen := make(map[string]bool)
	for n := range strings.SplitSeq(names, ",") {
		n = strings.TrimSpace(n)
		i := slices.IndexFunc(all, func(t T) bool { return name(t) == n })
		if i < 0 {
			return nil, fmt.Errorf("there is no %q", n)
		}
		if seen[n] {
			return nil, fmt.Errorf("%q is named twice", n)
		}
		seen[n] = true
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
	// The client's and the upstreams' own garbage must not be what is measured.
	debug.SetGCPercent(400)
	dir, err := os.MkdirTemp("", "kvrouter-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if o.caddy == "" {
		if o.caddy, err = buildCaddy(ctx, dir); err != nil {
			return err
		}
	} else if o.caddy, err = filepath.Abs(o.caddy); err != nil {
		return err
	}
	if o.profile != "" {
		if err := os.MkdirAll(o.profile, 0o750); err != nil {
			return err
		}
	}
	dog, err := startWatchdog()
	if err != nil {
		return err
	}
	defer dog.stop()
	up, err := startUpstreams()
	if err != nil {
		return err
	}
	defer up.stop()
	in := &surroundings{caddy: o.caddy, dir: dir, upstreams: up.addrs, watchdog: dog}
	for _, c := range o.contenders {
		fmt.Fprintf(stderr, "starting %s\n", c.name)
		if err := c.start(ctx, in); err != nil {
			return fmt.Errorf("starting %s: %w", c.name, err)
		}
		defer c.stop()
	}
	m := &meter{options: o, upstreams: up, log: stderr}
	m.seq.Store(firstNumber)
	m.measure(ctx)
	return m.finish(stdout)
}

// meter takes the samples.
type meter struct {
	*options
	upstreams *upstreams
	log       io.Writer
	seq       atomic.Int64 // the last request's number
	samples   []*sample
	// incomplete says why there are fewer samples than there should be.
	incomplete []string
}

// measure runs all rounds. Contenders take turns within a cell, so that what
// disturbs the machine for a while disturbs all of them; who is first moves on.
// One that has ended is left out from then on; anything else ends the rounds.
func (m *meter) measure(ctx context.Context) {
	for round := range m.rounds {
		for i, c := range m.cells {
			where := fmt.Sprintf("in round %d, cell %s", round+1, c.name)
			if err := m.upstreams.pace(c.pace); err != nil {
				m.incomplete = append(m.incomplete, fmt.Sprintf("%s: %v", where, err))
				return
			}
			made := make(map[traffic]*corpus)
			for k := range m.contenders {
				con := m.contenders[(k+round+i)%len(m.contenders)]
				if con.over {
					continue
				}
				s, err := m.sample(ctx, con, c, round, newLoad(con, c, made, &m.seq))
				if err != nil {
					m.incomplete = append(m.incomplete, fmt.Sprintf("%s: %v", where, err))
					fmt.Fprintln(m.log, m.incomplete[len(m.incomplete)-1])
					if !errors.Is(err, errEnded) {
						return
					}
					con.over = true
					continue
				}
				m.samples = append(m.samples, s)
				fmt.Fprintf(m.log, "round %d %-14s %-24s %8.0f req/s %8s ms CPU/req, p50 %8s ms, %d errors\n",
					round+1, c.name, con.name, float64(s.Rate), s.CPU.text(3), s.P50.text(3), s.Errors)
			}
		}
	}
}

// finish writes what was measured, however much it is.
func (m *meter) finish(stdout io.Writer) error {
	var failed []error
	if m.json != "" {
		failed = append(failed, writeJSON(m.json, m.samples, m.incomplete))
	}
	r := report{
		samples: m.samples, contenders: contenderNames(m.contenders), cells: namesOfCells(m.cells), rounds: m.rounds,
		incomplete: m.incomplete, over: make(map[string]bool),
	}
	for _, c := range m.contenders {
		r.over[c.name] = c.over
	}
	// One trial tells whether the system has the clocks.
	_, _, r.noClock = cpuTime(os.Getpid(), nil)
	failed = append(failed, r.write(stdout, m.markdown))
	if len(m.incomplete) > 0 {
		failed = append(failed, errors.New("the report is incomplete"))
	}
	return errors.Join(failed...)
}

func writeJSON(file string, samples []*sample, incomplete []string) error {
	host, _ := os.Hostname()
	out, err := json.MarshalIndent(map[string]any{
		"host": host, "cpus": runtime.NumCPU(), "go": runtime.Version(), "time": time.Now().UTC(),
		"samples": samples, "incomplete": incomplete,
	}, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(out, '\n'), 0o600)
}
