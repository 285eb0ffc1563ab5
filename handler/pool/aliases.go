package pool

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
)

// aliases are the models that have several names.
type aliases struct {
	finding sync.Mutex                        // of registry.findAliases
	of      atomic.Pointer[map[string]string] // from a name to the model's own
}

// Canonical returns the one name of a model that engines serve under several. Prompts and sessions
// of all its names are the same: the KV cache does not know the name.
func (a *aliases) Canonical(model string) string {
	if of := a.of.Load(); of != nil {
		return cmp.Or((*of)[model], model)
	}
	return model
}

// found records groups of names that are of one model each. The first name in alphabetical order is the
// model's own, so that all routers agree.
func (a *aliases) found(groups [][]string) {
	of := make(map[string]string)
	for changed := true; changed; { // groups may share names
		changed = false
		for _, names := range groups {
			first := slices.Min(names)
			for _, name := range names {
				first = min(first, cmp.Or(of[name], name))
			}
			for _, name := range names {
				changed = changed || of[name] != first
				of[name] = first
			}
		}
	}
	a.of.Store(&of)
}
