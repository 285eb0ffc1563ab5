// Command live compares the cached tokens that kv_router predicts with those that engines
// report. It starts a Caddy with kv_router before running engines, or before simulated
// ones, and holds conversations by each API. With -events, it checks what the router
// knows from the engines' KV events. README.md has the commands for each engine.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// kind is what differs between engines.
type kind struct {
	apis  []api
	salts bool   // it heeds cache_salt
	reset string // path that makes it forget its cache
	exact bool   // it replays events, so that the router can know all
}

var engineKinds = map[string]kind{
	"vllm":     {apis: apis, salts: true, reset: "/reset_prefix_cache", exact: true},
	"sglang":   {apis: []api{chat, completions, tokenIDs, messages}, reset: "/flush_cache", exact: true},
	"llamacpp": {apis: []api{chat, completions, responses, messages}},
	"llmdsim":  {apis: []api{tokenIDs}},
	"sim":      {apis: apis, salts: true, reset: engine.ResetPath, exact: true},
}

type options struct {
	kind                  kind
	engines, model        string
	adapter, directives   string
	conversations, turns  int
	clients, block        int
	blocks                int
	more, events          bool
	log                   string
	seed                  uint64
	restarts              func(context.Context) error // nil: no engine restarts
	simulated             engine.Config
	restartCommand, named string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "live:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing to do any more
	}
}

func run(ctx context.Context, args []string, w io.Writer) error {
	var o options
	f := flag.NewFlagSet("live", flag.ContinueOnError)
	f.StringVar(&o.named, "engine", "sim", "the `kind` of the engines: vllm, sglang, llamacpp, llmdsim, sim")
	f.StringVar(&o.engines, "engines", "", "`HOST:PORT,...` of running engines; sim without it starts two simulated ones")
	f.StringVar(&o.model, "model", "tiny", "the served model's `name`")
	f.StringVar(&o.adapter, "adapter", "", "with -events: the `name` of a LoRA adapter that a quarter of the conversations have")
	f.StringVar(&o.directives, "directives", "", "further `lines` of kv_router's block")
	f.IntVar(&o.conversations, "conversations", 100, "how many, shared out among the APIs")
	f.IntVar(&o.turns, "turns", 5, "turns of a conversation")
	f.IntVar(&o.clients, "clients", 4, "conversations at the same time")
	f.IntVar(&o.block, "block", 16, "`tokens` of a KV block of the engines")
	f.IntVar(&o.blocks, "blocks", 0, "KV blocks of each engine, to check what the router has seen; sim: as many has it")
	f.BoolVar(&o.more, "more", false, "also: shared documents, edited histories, parallel questions; a fifth as many conversations of each")
	f.BoolVar(&o.events, "events", false, "conversations of token ids without session keys, to check what the router knows from KV events")
	f.StringVar(&o.restartCommand, "restart", "", "with -events: a shell `command` that restarts the last engine and returns when it serves")
	f.StringVar(&o.log, "log", "", "`file` for the router's log; default: a temporary one")
	f.Uint64Var(&o.seed, "seed", 1, "of the texts and tokens")
	corpus := f.Bool("corpus", false, "print the text that vllm/setup.sh trains the tokenizer on, and nothing else")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *corpus {
		printCorpus(w)
		return nil
	}
	if o.restartCommand != "" {
		o.restarts = func(ctx context.Context) error {
			out, err := exec.CommandContext(ctx, "/bin/sh", "-c", o.restartCommand).CombinedOutput() //nolint:gosec // the user's
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
	}
	o.simulated = engine.Config{Model: o.model, Words: true, Speed: 20, BlockSize: o.block, Blocks: o.blocks}
	_, err := o.run(ctx, w)
	return err
}

// printCorpus prints texts of all kinds, with form feeds between them.
func printCorpus(w io.Writer) {
	rng := rand.New(rand.NewPCG(9, 9)) //nolint:gosec // not a secret
	for range 400 {
		for _, k := range kinds {
			fmt.Fprint(w, textOf(rng, k, 500), "\f")
		}
	}
}

// run starts the router, holds the conversations, and prints and checks the figures.
func (o *options) run(ctx context.Context, w io.Writer) ([]row, error) {
	k, ok := engineKinds[o.named]
	if !ok {
		return nil, fmt.Errorf("-engine %q is none of vllm, sglang, llamacpp, llmdsim, sim", o.named)
	}
	o.kind = k
	cl, err := cluster.New()
	if err != nil {
		return nil, err
	}
	defer cl.Stop()
	addrs, err := o.start(cl)
	if err != nil {
		return nil, err
	}
	if o.log == "" {
		o.log = cl.File("caddy.log")
	}
	r, err := startRouter(ctx, cl, addrs, o.log, o.directives)
	if err != nil {
		return nil, fmt.Errorf("starting the router: %w", err)
	}
	c := &client{url: r.url, clients: o.clients, block: o.block, rng: rand.New(rand.NewPCG(o.seed, 7))} //nolint:gosec // not a secret
	if o.events {
		c.mayFail = phaseDown
		e := &events{client: c, o: o, router: r}
		return nil, e.run(ctx, w)
	}
	s := shape{
		model: o.model, apis: o.kind.apis, conversations: max(1, o.conversations/len(o.kind.apis)),
		turns: o.turns, minText: 200, maxText: 2000, seed: o.seed,
	}
	for _, talks := range s.plans(o.more) {
		if err := c.hold(ctx, "", talks, o.turns); err != nil {
			return nil, err
		}
	}
	rows := c.summarize()
	printRows(w, rows)
	return rows, c.checkTexts(w, rows)
}

// start returns the engines' addresses. It starts simulated engines if none are given.
func (o *options) start(cl *cluster.Cluster) ([]string, error) {
	if o.engines != "" {
		return strings.Split(o.engines, ","), nil
	}
	if o.named != "sim" {
		return nil, errors.New("-engines is missing")
	}
	if o.events {
		o.simulated.Events = &engine.EventConfig{}
	}
	var addrs []string
	for range 2 {
		e, err := cl.StartEngine(o.simulated)
		if err != nil {
			return nil, err
		}
		addrs = append(addrs, e.Addr())
	}
	last := cl.Engines[len(cl.Engines)-1]
	o.restarts = func(context.Context) error {
		return last.Restart()
	}
	return addrs, nil
}
