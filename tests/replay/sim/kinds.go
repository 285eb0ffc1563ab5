package sim

import "slices"

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
	k := Kind{Sessions: sp.sessions, Reference: sp.pooled || sp.unbounded}
	k.Exact = !k.Reference && !slices.Contains(ignorant, policy)
	k.Published = sp.comparison && !k.Reference || slices.Contains(published, policy)
	return k, nil
}
