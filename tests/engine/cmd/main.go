// Command cmd runs simulated vLLM engines until it is interrupted:
//
//	go run ./tests/engine/cmd -addr 127.0.0.1:8001,127.0.0.1:8002 -speed 10
//
// It prints one line for each engine, with its name and its URL, and "ready" when all of
// them take requests. With -events it prints another
// line for each rank, with its endpoints of KV events.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// options is the command line.
type options struct {
	cfg    engine.Config
	addrs  string
	events bool

	transfer bool
	role     string
}

func parse(args []string) (*options, error) {
	o := &options{cfg: engine.Config{Step: batch.DefaultStepModel}}
	fs := flag.NewFlagSet("engine", flag.ContinueOnError)
	fs.StringVar(&o.addrs, "addr", "127.0.0.1:8001", "addresses to listen on, one for each engine, separated by commas")
	fs.StringVar(&o.cfg.Model, "model", "", "name of the model (default sim-8b)")
	fs.StringVar((*string)(&o.cfg.Flavour), "flavour", "", "what they look like: vllm, sglang, sglang-old, trtllm, llamacpp or dynamo (default vllm)")
	fs.IntVar(&o.cfg.Ranks, "ranks", 1, "data-parallel ranks of each engine")
	fs.IntVar(&o.cfg.BlockSize, "block-size", 16, "tokens in a KV block")
	fs.IntVar(&o.cfg.Blocks, "blocks", 16384, "KV blocks of each rank")
	fs.IntVar(&o.cfg.TokenBudget, "token-budget", 4096, "most tokens in a step")
	fs.Float64Var(&o.cfg.Speed, "speed", 1, "how much faster than real time, up to 100")
	fs.Float64Var(&o.cfg.Step.Base, "step-base", o.cfg.Step.Base, "milliseconds of each step")
	fs.Float64Var(&o.cfg.Step.PerToken, "step-token", o.cfg.Step.PerToken, "milliseconds for each token of a step")
	fs.Float64Var(&o.cfg.Step.Attention, "step-attention", o.cfg.Step.Attention, "milliseconds for each pair of tokens in a prefill")
	fs.Float64Var(&o.cfg.Step.DecodeContext, "step-context", o.cfg.Step.DecodeContext, "milliseconds for each token that decodes look back at")
	fs.BoolVar(&o.transfer, "transfer", false, "hand the KV of prompts to other engines, and get it from them")
	fs.StringVar(&o.role, "role", "", "with -transfer: prefill or decode; an SGLang needs one")
	fs.BoolVar(&o.events, "events", false, "publish KV events at free ports, which it prints")
	return o, fs.Parse(args)
}

// start starts the engines, or none.
func start(o *options) ([]*engine.Engine, error) {
	addrs := strings.Split(o.addrs, ",")
	engines := make([]*engine.Engine, 0, len(addrs))
	for i, addr := range addrs {
		cfg := o.cfg
		cfg.Name, cfg.Addr = fmt.Sprintf("e%d", i+1), addr
		if o.events {
			cfg.Events = &engine.EventConfig{}
		}
		if o.transfer {
			cfg.Transfer = &engine.Transfer{Role: engine.Role(o.role)}
		}
		e, err := engine.Start(cfg)
		if err != nil {
			stop(engines)
			return nil, err
		}
		engines = append(engines, e)
	}
	return engines, nil
}

func stop(engines []*engine.Engine) {
	for _, e := range engines {
		e.Close()
	}
}

func main() {
	o, err := parse(os.Args[1:])
	if err != nil {
		os.Exit(2) // the flag package has said why
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	engines, err := start(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, e := range engines {
		fmt.Println(e.Name(), e.URL())
		for i := range o.cfg.Ranks {
			if pub, replay := e.EventEndpoints(i); pub != "" {
				fmt.Println(e.Name(), "rank", i, "events", pub, replay)
			}
		}
	}
	fmt.Println("ready")
	<-ctx.Done()
	stop(engines)
}
