package sim

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/rules"
)

// spec is a policy by name.
type spec struct {
	name string
	make func(*rules.View) kvscore.Policy
	// comparison says that the policy is none of the router's; it can see exact
	// knowledge.
	comparison bool
	// sessions says that the policy needs them.
	sessions bool
	// soft says that the policy counts a session's binding in its cost; others are
	// bound by it.
	soft bool
	// pooled says that all engines have one cache, of the memory of all.
	pooled bool
}

var specs = []spec{
	{name: "predicted_latency", soft: true, make: func(*rules.View) kvscore.Policy { return kvscore.NewPredictedLatency() }},
	{name: "predicted_latency-wait", soft: true, make: ablated(noWait)},
	{name: "predicted_latency-delay", soft: true, make: ablated(noDelay)},
	{name: "predicted_latency-queue", soft: true, make: ablated(noQueue)},
	{name: "predicted_latency-decode", soft: true, make: ablated(noDecode)},
	{name: "predicted_latency-turns", soft: true, make: ablated(noTurns)},
	{name: "predicted_latency-leave", soft: true, make: ablated(noLeave)},
	{name: "dynamo", make: func(*rules.View) kvscore.Policy { return kvscore.NewDynamo() }},
	{name: "dynamo_16", make: func(*rules.View) kvscore.Policy {
		d := kvscore.NewDynamo()
		d.PrefillLoadScale = 16
		return d
	}},
	{name: "dynamo_agentic", make: func(*rules.View) kvscore.Policy { return kvscore.NewAgenticDynamo() }},
	{name: "round_robin", make: func(*rules.View) kvscore.Policy { return new(kvscore.RoundRobin) }},
	{name: "least_load", make: func(*rules.View) kvscore.Policy { return new(kvscore.LeastLoad) }},
	{name: "random", make: func(*rules.View) kvscore.Policy { return kvscore.Random{} }},
	{name: "power_of_two", make: func(*rules.View) kvscore.Policy { return kvscore.PowerOfTwo{} }},
	{name: "prefix_hash", make: func(*rules.View) kvscore.Policy { return new(kvscore.PrefixHash) }},
	{name: "cache_aware", comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.CacheAware{View: v} }},
	{name: "gaie", comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.GAIE{View: v} }},
	{name: "lmetric", comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.LMetric{View: v} }},
	{name: "smetric", comparison: true, make: func(v *rules.View) kvscore.Policy {
		return &rules.SMetric{MinTTFT: rules.MinTTFT{View: v}, Bound: rules.SMetricBound}
	}},
	{name: "min_ttft", comparison: true, make: func(v *rules.View) kvscore.Policy { return &rules.MinTTFT{View: v} }},
	{name: "sticky_hash", comparison: true, sessions: true, make: func(v *rules.View) kvscore.Policy { return &rules.StickyHash{View: v} }},
	{name: "pool", comparison: true, pooled: true, make: leastWork},
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
		return nil, fmt.Errorf("unknown policy %q, want one of %s", name, strings.Join(Policies(), ", "))
	}
	return &specs[i], nil
}

// published are the router's policies that are published rules, unchanged.
var published = []string{"dynamo", "dynamo_16", "dynamo_agentic", "round_robin", "least_load", "random", "power_of_two", "prefix_hash"}

// ignorant are the policies that do not ask what targets hold.
var ignorant = []string{"round_robin", "least_load", "random", "power_of_two", "prefix_hash", "sticky_hash"}

// Kind is what a policy is, for comparisons.
type Kind struct {
	// Published says that it is a published rule; it does not use the router's
	// session store.
	Published bool
	// Exact says that exact knowledge of the engines' blocks makes a difference.
	Exact bool
	// Sessions says that it cannot do without sessions.
	Sessions bool
	// Reference says that its engines have one cache: no router can do that.
	Reference bool
}

// KindOf returns the kind of a policy.
func KindOf(policy string) (Kind, error) {
	sp, err := find(policy)
	if err != nil {
		return Kind{}, err
	}
	k := Kind{Sessions: sp.sessions, Reference: sp.pooled}
	k.Exact = !k.Reference && !slices.Contains(ignorant, policy)
	k.Published = sp.comparison && !k.Reference || slices.Contains(published, policy)
	return k, nil
}
