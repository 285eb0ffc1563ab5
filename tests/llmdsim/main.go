//go:build linux

// Command llmdsim checks what kv_router knows from the KV events of llm-d-inference-sim, the
// engine simulator of the llm-d project. It starts two of them and a Caddy with kv_router, and
// holds conversations of token ids. README.md says more.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

type options struct {
	caddy, sim, dir string
	blocks          int
	seed            uint64
}

func main() {
	log.SetFlags(0)
	var o options
	flag.StringVar(&o.caddy, "caddy", "", "a Caddy `binary` with kv_router; default: the one of this tree")
	flag.StringVar(&o.sim, "sim", "", "a `binary` of llm-d-inference-sim; default: the one that ./tool names")
	flag.StringVar(&o.dir, "logs", "", "`folder` for the logs; default: a temporary one")
	flag.IntVar(&o.blocks, "blocks", 6000, "KV blocks of each engine")
	flag.Uint64Var(&o.seed, "seed", 1, "of the token ids")
	inside := flag.Bool("inside", false, "the network namespace exists already")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := o.outside
	if *inside {
		run = o.inside
	}
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

// outside builds what is missing, and runs this program again in a network namespace: the
// simulator listens on all interfaces.
func (o *options) outside(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "kvrouter-llmdsim-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if o.dir == "" {
		o.dir = dir
	}
	for _, b := range []struct {
		to         *string
		in, source string
	}{
		{&o.caddy, ".", "github.com/caddy-kvrouter/kvrouter/cmd/caddy"},
		{&o.sim, "tests/llmdsim/tool", "github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim"},
	} {
		if *b.to != "" {
			continue
		}
		*b.to = filepath.Join(dir, filepath.Base(b.source))
		build := exec.CommandContext(ctx, "go", "build", "-C", b.in, "-o", *b.to, b.source)
		build.Env = append(os.Environ(), "GOWORK=off") // the workspace lacks the simulator's module
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("building %s: %w\n%s", b.source, err, out)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	again := exec.CommandContext(ctx, "unshare", "--map-root-user", "--net", "sh", "-c", `ip link set lo up && exec "$0" "$@"`, self,
		"-inside", "-caddy", o.caddy, "-sim", o.sim, "-logs", o.dir, "-blocks", fmt.Sprint(o.blocks), "-seed", fmt.Sprint(o.seed))
	again.Stdout, again.Stderr = os.Stdout, os.Stderr
	again.Cancel = func() error { return again.Process.Signal(syscall.SIGTERM) }
	return again.Run()
}

// inside runs the check with each encoding of events.
func (o *options) inside(ctx context.Context) error {
	var failed error
	for _, encoding := range []string{"arrays", "maps"} {
		fmt.Printf("Events encoded as %s\n\n", encoding)
		if err := o.try(ctx, encoding); err != nil {
			failed = errors.Join(failed, fmt.Errorf("events encoded as %s: %w", encoding, err))
		}
	}
	return failed
}

// The phases.
const (
	phaseFresh = "fresh"
	phaseDown  = "engine down"
	phaseBack  = "engine back"
	phaseFull  = "evictions"
)

// try holds conversations before, while and after one engine is down, prints what the router
// knew, and returns an error if a check failed.
func (o *options) try(ctx context.Context, encoding string) error {
	s := &servers{options: o, maps: encoding == "maps"}
	defer s.stop()
	if err := s.start(ctx); err != nil {
		return err
	}
	r := &run{
		Load: &exactness.Load{
			Router: routerAddr, Model: model, Clients: 1, MayFail: phaseDown, NoIDs: true,
			Rand: rand.New(rand.NewPCG(o.seed, 11)), //nolint:gosec // not a secret
		},
		s: s, router: &exactness.Router{Admin: adminAddr, Engines: s.engines()},
	}
	err := r.all(ctx)
	_ = r.Print(os.Stdout, blockSize, phaseFresh, phaseDown, phaseBack, phaseFull)
	_ = exactness.PrintStreams(os.Stdout, r.looks)
	if err != nil {
		return err
	}
	return r.check(os.Stdout)
}
