package admin

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/caddyserver/caddy/v2"
)

func checkCommand() *cobra.Command {
	cmd := plainCommand("check", "Asks the engines of a configuration what they are, and says what is wrong", cobra.NoArgs, runCheck)
	cmd.Long = `Reads a configuration as caddy validate does, and asks its engines what they are,
serve and hold. It says what contradicts the configuration, and what keeps the
router from routing well. It serves nothing and writes nothing. It ends with code
2 if it finds a problem.`
	cmd.Flags().StringP("config", "c", "Caddyfile", "Configuration file")
	cmd.Flags().StringP("adapter", "a", "", "Name of the config adapter")
	cmd.Flags().Duration("timeout", 6*time.Second, "How long the engines may take")
	return cmd
}

func runCheck(fl caddycmd.Flags) (int, error) {
	input, _, _, err := caddycmd.LoadConfig(fl.String("config"), fl.String("adapter"))
	if err != nil {
		return exitFailed, err
	}
	cfg := new(caddy.Config)
	if err = caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields(input), cfg); err != nil {
		return exitFailed, fmt.Errorf("decoding config: %w", err)
	}
	// what the log would warn of, the report says
	cfg.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{Level: zap.ErrorLevel.CapitalString()}}}}
	if _, err = caddy.ProvisionContext(cfg); err != nil {
		return exitFailed, err
	}
	for x := range explainers.Range {
		x.(*Explainer).Dispatcher.Prober.Start()
	}
	if len(sortedPools()) == 0 {
		return exitFailed, fmt.Errorf("the configuration has no kv_router")
	}
	if checkPools(fl.Duration("timeout")) > 0 {
		return exitLook, nil
	}
	return exitOK, nil
}

// checkPools prints what the engines have answered within a time, and returns the number of problems.
func checkPools(timeout time.Duration) (found int) {
	end, workers := time.Now().Add(timeout), 0
	for _, p := range sortedPools() {
		fmt.Printf("pool %s\n", p.Name)
		byAddress := make(map[string]string) // of workers
		for _, w := range sortedWorkers(p) {
			if w.IsBackup() {
				fmt.Printf("  %s is a backup, which gets requests only: it is not checked\n", w.Dial)
				continue
			}
			worker.AwaitProbes(context.Background(), time.Until(end), []*worker.Worker{w})
			found += writeChecked(p, w)
			for _, addr := range addressesOf(w.Dial) {
				if other := cmp.Or(byAddress[addr], w.Dial); other != w.Dial {
					fmt.Printf("    problem: it is at the same address as %s: list an engine once, or its load and its cache are counted apart\n", other)
					found++
					break
				}
				byAddress[addr] = w.Dial
			}
			workers++
		}
		if set := p.Settings.Load(); set.Others {
			fmt.Println("  workers of a dynamic source, or with a placeholder, are found by requests: they are not checked")
		}
		for _, in := range p.Incidents.Open(time.Now()) {
			fmt.Printf("  problem: %s\n", in.What)
			found++
		}
		found += checkNames(p)
	}
	if found > 0 {
		fmt.Printf("problems: %d\n", found)
	} else {
		fmt.Printf("no problem, workers: %d\n", workers)
	}
	return found
}

// checkNames prints the public names of models that no engine serves, and returns their number.
func checkNames(p *pool.Pool) (found int) {
	x := explainerOf(p)
	if x == nil || p.Settings.Load().Others {
		return 0
	}
	for name, models := range x.Reader.Public.List {
		for _, model := range models {
			if !slices.ContainsFunc(p.All(), func(w *worker.Worker) bool {
				yes, known := w.Serves(model)
				return yes || !known
			}) {
				fmt.Printf("  problem: model %s: no engine serves %s\n", name, model)
				found++
			}
		}
	}
	return found
}

// addressesOf returns the addresses of a worker, nil if its name cannot be resolved.
func addressesOf(dial string) (list []string) {
	host, port, err := net.SplitHostPort(dial)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	ips, _ := net.DefaultResolver.LookupHost(ctx, host)
	for _, ip := range ips {
		list = append(list, net.JoinHostPort(ip, port))
	}
	return list
}

func writeChecked(p *pool.Pool, w *worker.Worker) (problems int) {
	v := viewWorker(p, w, time.Now(), nil)
	models := v.Models.names()
	e := &v.Engine
	kind := strings.TrimSpace(cmp.Or(e.Type, "engine unknown") + " " + e.Version)
	fmt.Printf("  %s: %s, models %s", w.Dial, kind, cmp.Or(strings.Join(models, " "), "unknown"))
	if n := v.Cache.ReportedTokens; n > 0 {
		fmt.Printf(", %d KV tokens", n)
	}
	if n := v.Load.MaxRunning; n > 0 {
		fmt.Printf(", max_running %d", n)
	}
	fmt.Println()
	say := func(format string, args ...any) {
		problems++
		fmt.Printf("    problem: "+format+"\n", args...)
	}
	switch status := w.ListingStatus(); {
	case !w.WasProbed():
		say("it has not answered in time")
	case v.Health.Refusing != nil && *v.Health.Refusing:
		say("it cannot be reached: %s", w.Past.Fault())
	case len(models) > 0, w.RefusesModels(), status == http.StatusBadRequest: // a warning tells of the last two
	case status == 0:
		say("its models are unknown: GET /v1/models gets no answer")
	default:
		say("its models are unknown: GET /v1/models answers %d; set worker models", status)
	}
	for _, s := range e.Contradictions {
		say("%s", s)
	}
	for _, of := range e.Warnings {
		say("%s: %s; %s", of.What, of.Effect, of.Advice)
	}
	return problems
}
