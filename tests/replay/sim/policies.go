package sim

import (
	"fmt"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/rules"
)

// spec is a policy by name.
type spec struct {
	name string
	make func(*rules.View) kvscore.Policy
	Kind
	// comparison says that the policy is none of the router's; it can see exact
	// knowledge.
	comparison bool
	// soft says that the policy counts a session's binding in its cost; others are
	// bound by it.
	soft bool
}

var specs = []spec{
	{name: "predicted_latency", Kind: own, soft: true, make: func(*rules.View) kvscore.Policy { return kvscore.NewPredictedLatency() }},
	{name: "dynamo", Kind: rule, make: func(*rules.View) kvscore.Policy { return kvscore.NewDynamo() }},
	{name: "dynamo_16", Kind: rule, make: func(*rules.View) kvscore.Policy { return scaled(16) }},
	{name: "dynamo_32", Kind: rule, make: func(*rules.View) kvscore.Policy { return scaled(32) }},
	{name: "dynamo_agentic", Kind: rule, make: func(*rules.View) kvscore.Policy { // router presets, Dynamo's pull request 13447
		d := kvscore.NewDynamo()
		d.OverlapScoreCredit, d.PrefillLoadScale, d.DecodeActiveRequestWeight = 2, 4, 64
		return d
	}},
	{name: "round_robin", Kind: ignorant, make: func(*rules.View) kvscore.Policy { return new(kvscore.RoundRobin) }},
	{name: "least_load", Kind: ignorant, make: func(*rules.View) kvscore.Policy { return new(kvscore.LeastLoad) }},
	{name: "random", Kind: ignorant, make: func(*rules.View) kvscore.Policy { return kvscore.Random{} }},
	{name: "power_of_two", Kind: ignorant, make: func(*rules.View) kvscore.Policy { return kvscore.PowerOfTwo{} }},
	{name: "prefix_hash", Kind: ignorant, make: func(*rules.View) kvscore.Policy { return new(kvscore.PrefixHash) }},
	{name: "cache_aware", Kind: rule, comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.CacheAware{View: v} }},
	{name: "gaie", Kind: rule, comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.GAIE{View: v} }},
	{name: "lmetric", Kind: rule, comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.LMetric{View: v} }},
	{name: "smetric", Kind: rule, comparison: true, make: func(v *rules.View) kvscore.Policy {
		return &rules.SMetric{MinTTFT: rules.MinTTFT{View: v}, Bound: rules.SMetricBound}
	}},
	{name: "min_ttft", Kind: rule, comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.MinTTFT{View: v} }},
	{name: "sticky_hash", Kind: Kind{Published: true, Sessions: true}, comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.StickyHash{View: v} }},
	{name: "pool", Kind: Kind{Reference: true}, comparison: true, make: leastWork},
}

// scaled returns Dynamo's formula with a prefill_load_scale.
func scaled(scale float64) kvscore.Policy {
	d := kvscore.NewDynamo()
	d.PrefillLoadScale = scale
	return d
}

func leastWork(v *rules.View) kvscore.Policy {
	v.Exact = true // the cache model knows nothing of a common cache
	return &rules.LeastWork{MinTTFT: rules.MinTTFT{View: v}}
}

// Policies returns the names of all policies.
func Policies() []string {
	names := make([]string, len(specs))
	for i := range specs {
		names[i] = specs[i].name
	}
	return names
}

func find(name string) (*spec, error) {
	i := slices.IndexFunc(specs, func(s spec) bool { return s.name == name })
	if i < 0 {
		return nil, fmt.Errorf("unknown policy %q", name)
	}
	return &specs[i], nil
}

// KindOf returns the kind of one of Policies.
func KindOf(policy string) Kind {
	sp, err := find(policy)
	if err != nil {
		return Kind{}
	}
	return sp.Kind
}

// Kind is what a policy is, for comparisons.
type Kind struct {
	// Published says that it is a published rule; it does not use the router's
	// session store.
	Published bool
	// Exact says that exact knowledge of the engines' blocks makes a difference.
	Exact bool
	// Sessions says that it cannot do without sessions.
	Sessions bool
	// Reference says that all engines have one cache, of the memory of all: no router
	// can do that.
	Reference bool
}

// The kinds of most policies.
var (
	own      = Kind{Exact: true}
	rule     = Kind{Published: true, Exact: true}
	ignorant = Kind{Published: true} // does not ask what targets hold
)
