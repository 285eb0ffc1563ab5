//go:build unix

// Command vllm measures how well kv_router predicts what real engines have cached.
// It starts two vLLM servers, or one of several data-parallel ranks, and a Caddy with
// kv_router before them. It holds conversations by each API, and prints the figures. With -exact, it checks what the
// router knows from the engines' KV events. README.md says how to install vLLM.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/prediction"
)

type options struct {
	venv, caddy, log string
	conversations    int
	turns, clients   int
	block, blocks    int
	ranks            int // data-parallel ranks of an engine
	more, asJSON     bool
	serve            bool
	exact            bool
	events           string // how the engines publish KV events; empty: they do not
	out              string
	seed             uint64
}

func main() {
	log.SetFlags(0)
	var o options
	cache, _ := os.UserCacheDir()
	flag.StringVar(&o.venv, "venv", filepath.Join(cache, "kvrouter-vllm"), "the `folder` that setup.sh made")
	flag.StringVar(&o.caddy, "caddy", "", "a Caddy `binary` with kv_router; default: the one of this tree")
	flag.StringVar(&o.log, "logs", "", "`folder` for the logs of Caddy and vLLM; default: a temporary one")
	flag.IntVar(&o.conversations, "conversations", 100, "how many, shared out among the APIs")
	flag.IntVar(&o.turns, "turns", 5, "turns of a conversation")
	flag.IntVar(&o.clients, "clients", 4, "conversations at the same time")
	flag.IntVar(&o.block, "block", 32, "tokens of a KV block: a multiple of 32 on a CPU")
	flag.IntVar(&o.blocks, "blocks", 0, "KV blocks of each engine, one of which vLLM keeps for itself; default: as many as fit 1 GiB")
	flag.IntVar(&o.ranks, "ranks", 1, "data-parallel ranks; from 2 on, one engine has all of them, and there is no second engine")
	flag.BoolVar(&o.serve, "serve", false, "start the engines alone, print their addresses, and leave the requests to you")
	flag.BoolVar(&o.exact, "exact", false, "check what the router knows from KV events, through evictions, a reset and a restart")
	flag.StringVar(&o.events, "events", "", "with -exact, how the engines publish: ipc (default), or tcp (on all interfaces; default with -ranks)")
	flag.Uint64Var(&o.seed, "seed", 1, "of the texts")
	flag.BoolVar(&o.more, "more", false, "also: shared documents, edited histories, parallel questions; a fifth as many conversations of each")
	flag.BoolVar(&o.asJSON, "json", false, "print the figures as JSON")
	flag.StringVar(&o.out, "out", "", "`file` for all turns, as JSON lines")
	corpus := flag.Bool("corpus", false, "print the text that setup.sh trains the tokenizer on, and nothing else")
	flag.Parse()
	if *corpus {
		printCorpus()
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := o.run(ctx); err != nil {
		log.Fatal(err)
	}
}

// printCorpus prints texts of all kinds, with form feeds between them.
func printCorpus() {
	rng := rand.New(rand.NewPCG(9, 9)) //nolint:gosec // not a secret
	for range 400 {
		for _, k := range prediction.Kinds {
			fmt.Print(prediction.Text(rng, k, 500), "\f")
		}
	}
}

// run starts all, converses, and prints the figures.
func (o *options) run(ctx context.Context) error {
	if o.exact {
		o.setExact()
	} else {
		o.events = ""
	}
	c, err := o.start(ctx)
	if err != nil {
		return err
	}
	defer c.stop()
	if o.serve {
		fmt.Println(strings.Join(c.engines, ","))
		<-ctx.Done()
		return nil
	}
	if o.exact {
		return o.runExact(ctx, c)
	}
	begun := time.Now()
	r := &prediction.Run{
		URL: "http://" + c.router, Engine: "http://" + c.engines[0], Model: model, Clients: o.clients, Block: o.block,
		Progress: func(done int) { fmt.Fprintf(os.Stderr, "\r%d turns", done) },
	}
	var turns []prediction.Turn
	for _, p := range o.plans() {
		more, err := r.Converse(ctx, p)
		turns = append(turns, more...)
		if err != nil {
			return err
		}
	}
	fmt.Fprintf(os.Stderr, "\r%d turns in %v\n", len(turns), time.Since(begun).Round(time.Second))
	if err := save(o.out, turns); err != nil {
		return err
	}
	rows := prediction.Summarize(turns, o.block)
	if o.asJSON {
		return json.NewEncoder(os.Stdout).Encode(rows)
	}
	return prediction.Print(os.Stdout, rows)
}

func (o *options) plans() [][]prediction.Plan {
	s := prediction.Shape{
		Conversations: max(1, o.conversations/len(prediction.APIs)), Turns: o.turns, MinText: 200, MaxText: 2000, Seed: o.seed,
	}
	own := s.Own("own")
	if !o.more {
		return [][]prediction.Plan{own}
	}
	s.Conversations = max(4, s.Conversations/5)
	first, others := s.Shared("shared", 4)
	for i := range first {
		first[i].Case = "first to share"
	}
	return [][]prediction.Plan{own, first, others, s.Edited("edited"), s.Parallel("parallel")}
}

// save writes a list as JSON lines, unless the file has no name.
func save[T any](file string, list []T) error {
	if file == "" {
		return nil
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(f)
	for i := range list {
		if err := enc.Encode(&list[i]); err != nil {
			return err
		}
	}
	return f.Close()
}
