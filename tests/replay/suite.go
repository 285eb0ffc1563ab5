package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/synth"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// setup is what a trace is replayed against in the suite. Workers and capacities
// are such that the published rules differ as they do in publications. Prompts that
// many share, or the histories of agents, fill the memory.
type setup struct {
	trace    string // the beginning of its name
	workers  int
	kv       int64
	overload float64 // a speed for engine.Default; 0 is none
	alone    bool    // one request at a time: it is replayed at its own speed only
}

var setups = []setup{
	{"synth:idle", 8, 200_000, 0, true},
	{"synth:same_prompt_sequence", 8, 200_000, 0, true},
	{"synth:", 8, 200_000, 0, false},
	{"mooncake_conversation_a.", 8, 500_000, 2.5, false},
	{"toolagent_like.", 8, 500_000, 2.0, false},
	{"shared_prefix.", 8, 200_000, 0, false},
	{"azure_code.", 8, 200_000, 0, false},
	{"cc_agent_a.", 8, 2_000_000, 0, false},
	{"cc_agent_a.", 32, 500_000, 0, false},
}

// otherwise is the setup of any other trace.
var otherwise = setup{"", 8, 500_000, 0, false}

// base is the policy whose saturation the loads are shares of.
const base = "dynamo"

// overload is the load beyond saturation, which few traces have. On other engines than the
// default one it is a share, about what the speeds above are of the saturation there.
const overload = "overload"

// loads are the shares of the speed at saturation.
var loads = []struct {
	name  string
	share float64
}{{"low", 0.35}, {"middle", 0.7}, {"high", 0.95}, {overload, 1.12}}

// suitePolicies are replayed if no others are named; the first is compared with.
var suitePolicies = []string{
	"dynamo", "dynamo_16", "least_load", "cache_aware", "gaie", "lmetric", "smetric", "min_ttft", "sticky_hash",
	"predicted_latency", "pool",
}

// suiteCell is one row of the suite: a trace with a setup at a load.
type suiteCell struct {
	Trace    string
	Workers  int
	KVTokens int64
	Load     string
	Speed    float64
	Sessions string
	// Policies are the figures of each policy, with Relative to the base. The name
	// of a policy with exact knowledge ends in exactly.
	Policies map[string]*sim.Result
	// Best is the published rule with the lowest mean TTFT, BestExact the one
	// among those with exact knowledge.
	Best      string
	BestExact string
	// OverBest is the mean TTFT of each policy relative to the best published rule;
	// OverBestExact that to the best one with exact knowledge.
	OverBest      map[string]float64
	OverBestExact map[string]float64

	at    *trace.Trace
	setup setup
}

// exactly marks the policies with exact knowledge in the suite.
const exactly = "!exact"

// runSuite replays all policies on all cells, and sums up.
func (o *options) runSuite(stderr io.Writer) (*summary, error) {
	places, err := o.places()
	if err != nil {
		return nil, err
	}
	cells, err := o.suiteCells(places, stderr)
	if err != nil {
		return nil, err
	}
	if err := o.fill(cells, stderr); err != nil {
		return nil, err
	}
	return o.summarise(cells), nil
}

// place is a trace with a setup.
type place struct {
	setup
	trace *trace.Trace
}

// setUp returns the cluster of a setup, with what the flags change in it.
func (o *options) setUp(s setup) sim.Cluster {
	c := o.cluster
	c.Workers, c.KVTokens = s.workers, []int64{s.kv}
	return c
}

// places reads the traces and gives each its setups.
func (o *options) places() (places []place, err error) {
	var paths []string
	for path := range strings.SplitSeq(o.traces, ",") {
		if path == "synth" {
			for _, name := range synth.Names() {
				paths = append(paths, "synth:"+name)
			}
			continue
		}
		found, err := trace.Files(path)
		if err != nil {
			return nil, err
		}
		paths = append(paths, found...)
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("there is no trace in %s", o.traces)
	}
	for _, path := range paths {
		t, err := read(path)
		if err != nil {
			return nil, err
		}
		for _, s := range setupsOf(filepath.Base(path)) {
			places = append(places, place{s, t})
		}
	}
	return places, nil
}

// setupsOf returns the setups of a trace: those with the longest name that fits.
func setupsOf(trace string) []setup {
	fit := []setup{otherwise}
	for _, s := range setups {
		switch known := len(fit[0].trace); {
		case !strings.HasPrefix(trace, s.trace) || len(s.trace) < known:
		case len(s.trace) > known:
			fit = append(fit[:0], s)
		default:
			fit = append(fit, s)
		}
	}
	return fit
}

// suiteCells finds the saturation of each place and lists its cells.
func (o *options) suiteCells(places []place, stderr io.Writer) ([]*suiteCell, error) {
	saturations, errs := make([]float64, len(places)), make([]error, len(places))
	fmt.Fprintf(stderr, "looking for the saturation of %s in %d places\n", base, len(places))
	var all sync.WaitGroup
	for i, p := range places {
		if p.alone {
			continue
		}
		all.Go(func() {
			saturations[i], errs[i] = sim.Saturation(sim.Config{Trace: p.trace, Policy: base, Cluster: o.setUp(p.setup), Seed: o.seeds[0]})
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("looking for the saturation of %s: %w", base, err)
	}
	var cells []*suiteCell
	for i, p := range places {
		add := func(load string, speed float64) {
			for _, sessions := range o.suiteSessions(p.trace) {
				cells = append(cells, &suiteCell{
					Trace: p.trace.Name, Workers: p.workers, KVTokens: p.kv, Load: load, Speed: speed, Sessions: sessions,
					Policies: make(map[string]*sim.Result), at: p.trace, setup: p.setup,
				})
			}
		}
		if p.alone {
			add("alone", 1)
			continue
		}
		for _, l := range loads {
			switch {
			case l.name != overload:
				add(l.name, l.share*saturations[i])
			case p.overload > 0 && o.cluster.Engine == engine.Default():
				add(l.name, p.overload)
			case p.overload > 0:
				add(l.name, l.share*saturations[i])
			}
		}
	}
	return cells, nil
}

func (o *options) suiteSessions(t *trace.Trace) []string {
	if o.sessions == "both" && t.Sessions {
		return []string{"none", "key"}
	} else if o.sessions == "both" {
		return []string{"none"}
	}
	return []string{o.sessions}
}

// variant is a policy as a cell has it.
type variant struct {
	policy      string
	exact, keys bool
}

func (v variant) name() string {
	if v.exact {
		return v.policy + exactly
	}
	return v.policy
}

// variants lists the policies of a cell. Published rules have no use for session
// keys, but for those that cannot do without.
func (o *options) variants(sessions string) (list []variant, err error) {
	for _, p := range o.policies {
		k, err := sim.KindOf(p)
		if err != nil {
			return nil, err
		}
		if k.Sessions && sessions == "none" {
			continue
		}
		keys := sessions == "key" && !k.Published && !k.Reference
		list = append(list, variant{p, false, keys})
		if k.Exact && o.knowledge == "both" {
			list = append(list, variant{p, true, keys})
		}
	}
	return list, nil
}

// fill replays all variants of all cells. What a session key does not change is
// replayed once.
func (o *options) fill(cells []*suiteCell, stderr io.Writer) error {
	type key struct {
		trace *trace.Trace
		setup setup
		speed float64
		variant
	}
	var runs []sim.Config
	first := make(map[key]int)
	each := func(f func(c *suiteCell, v variant, k key)) error {
		for _, c := range cells {
			variants, err := o.variants(c.Sessions)
			if err != nil {
				return err
			}
			for _, v := range variants {
				f(c, v, key{c.at, c.setup, c.Speed, v})
			}
		}
		return nil
	}
	err := each(func(c *suiteCell, v variant, k key) {
		if _, known := first[k]; known {
			return
		}
		first[k] = len(runs)
		for _, seed := range o.seeds {
			runs = append(runs, sim.Config{
				Trace: c.at, Policy: v.policy, Cluster: o.setUp(c.setup), Speed: c.Speed, Seed: seed, Exact: v.exact, Sessions: v.keys,
			})
		}
	})
	if err != nil {
		return err
	}
	results, err := replayAll(runs, stderr)
	if err != nil {
		return err
	}
	return each(func(c *suiteCell, v variant, k key) {
		c.Policies[v.name()] = sim.Mean(slices.Clone(results[first[k] : first[k]+len(o.seeds)]))
	})
}
