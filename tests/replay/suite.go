package main

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

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
	{"synth:lognormal", 8, 200_000, 0, false},
	{"synth:lognormal", 8, 500_000, 0, false},
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

// cell is one row of the tables: a trace with a setup, at a load.
type cell struct {
	setup
	trace    *trace.Trace
	load     string
	speed    float64
	sessions string
	// policies are the figures of each policy. The name of one with exact knowledge ends
	// in exactly.
	policies map[string]*sim.Result
	// best is the published rule with the lowest mean TTFT, bestExact the one among
	// those with exact knowledge, if there are any.
	best, bestExact string
}

// exactly marks the policies with exact knowledge, several those with several routers.
const exactly, several = "!exact", " x"

// place is a trace with a setup.
type place struct {
	setup
	trace *trace.Trace
}

// on returns the cluster of a setup.
func (o *options) on(s setup) sim.Cluster {
	c := o.cluster
	c.Workers, c.KVTokens = s.workers, s.kv
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
		paths = append(paths, trace.Files(path)...)
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("there is no trace in %s", o.traces)
	}
	for _, path := range paths {
		t, err := read(path)
		if err != nil {
			return nil, err
		}
		if o.spread {
			t.Spread()
		}
		setups := []setup{{workers: o.cluster.Workers, kv: o.cluster.KVTokens}}
		if o.suite {
			setups = setupsOf(filepath.Base(path))
		}
		for _, s := range setups {
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

// cells lists the rows. In the suite it finds the saturation of each place first.
func (o *options) cells(stderr io.Writer) ([]*cell, error) {
	places, err := o.places()
	if err != nil {
		return nil, err
	}
	saturations, err := o.saturations(places, stderr)
	if err != nil {
		return nil, fmt.Errorf("looking for the saturation of %s: %w", base, err)
	}
	var cells []*cell
	for i, p := range places {
		add := func(load string, speed float64) {
			for _, sessions := range []string{"none", "key"} {
				if (o.sessions == "both" || o.sessions == sessions) && (sessions == "none" || p.trace.Sessions) {
					cells = append(cells, &cell{
						setup: p.setup, trace: p.trace, load: load, speed: speed, sessions: sessions, policies: make(map[string]*sim.Result),
					})
				}
			}
		}
		switch {
		case !o.suite:
			for _, speed := range o.speeds {
				add("given", speed)
			}
			continue
		case p.alone:
			add("alone", 1)
			continue
		}
		for _, l := range loads {
			switch {
			case l.name != overload || p.overload > 0 && o.cluster.Engine != engine.Default():
				add(l.name, l.share*saturations[i])
			case p.overload > 0:
				add(l.name, p.overload)
			}
		}
	}
	return cells, nil
}

// saturations returns the saturation of each place whose loads are shares of it.
func (o *options) saturations(places []place, stderr io.Writer) ([]float64, error) {
	speeds := make([]float64, len(places))
	if !o.suite {
		return speeds, nil
	}
	return speeds, each(len(places), "saturations of "+base, stderr, func(i int) (err error) {
		if p := places[i]; !p.alone {
			speeds[i], err = sim.Saturation(sim.Config{Trace: p.trace, Policy: base, Cluster: o.on(p.setup), Seed: o.seeds[0]})
		}
		return err
	})
}

// variant is a policy as a cell has it.
type variant struct {
	policy      string
	exact, keys bool // in place of the approximate knowledge, or beside it if both are wanted
	routers     sim.Routers
}

func (v variant) name() string {
	switch {
	case v.exact:
		return v.policy + exactly
	case v.routers.Number < 2:
		return v.policy
	case v.routers.Share:
		return fmt.Sprintf("%s%d journal %v", v.policy+several, v.routers.Number, v.routers.Late)
	}
	return fmt.Sprintf("%s%d none", v.policy+several, v.routers.Number)
}

// variants lists the policies of a cell. Published rules have no use for session
// keys, but for those that cannot do without.
func (o *options) variants(sessions string) (list []variant) {
	for _, p := range o.policies {
		k := sim.KindOf(p)
		if k.Sessions && sessions == "none" {
			continue
		}
		keys := sessions == "key" && !k.Published && !k.Reference
		list = append(list, variant{policy: p, keys: keys})
		if k.Exact && o.knowledge == "both" {
			list = append(list, variant{policy: p, exact: true, keys: keys})
		}
		for _, n := range o.routers {
			list = append(list, o.several(p, keys, n)...)
		}
	}
	return list
}

// several lists how several routers may fare.
func (o *options) several(policy string, keys bool, n int) (list []variant) {
	if n < 2 {
		return nil
	}
	for _, share := range o.share {
		for _, late := range o.late {
			v := variant{policy: policy, keys: keys, routers: sim.Routers{Number: n, Share: share == "journal", Late: late}}
			if !v.routers.Share {
				v.routers.Late = 0
			}
			if !slices.Contains(list, v) {
				list = append(list, v)
			}
		}
	}
	return list
}

// fill replays all variants of all cells. What a session key does not change is
// replayed once.
func (o *options) fill(cells []*cell, stderr io.Writer) error {
	type key struct {
		trace *trace.Trace
		setup setup
		speed float64
		variant
	}
	var runs []sim.Config
	first := make(map[key]int)
	for _, c := range cells {
		for _, v := range o.variants(c.sessions) {
			k := key{c.trace, c.setup, c.speed, v}
			if _, known := first[k]; known {
				continue
			}
			first[k] = len(runs)
			for _, seed := range o.seeds {
				runs = append(runs, sim.Config{
					Trace: c.trace, Policy: v.policy, Cluster: o.on(c.setup), Speed: c.speed, Seed: seed, Exact: v.exact || o.exact(v.policy), Learned: o.knowledge == "learned", Sessions: v.keys, Routers: v.routers,
				})
			}
		}
	}
	results, err := replayAll(runs, stderr)
	if err != nil {
		return err
	}
	for _, c := range cells {
		for _, v := range o.variants(c.sessions) {
			n := first[key{c.trace, c.setup, c.speed, v}]
			c.policies[v.name()] = sim.Mean(results[n : n+len(o.seeds)])
		}
		c.compare(o.policies[0])
	}
	return nil
}
