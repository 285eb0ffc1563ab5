package pool

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// aliases are the models that have several names.
type aliases struct {
	mu sync.Mutex                        // of findAliases
	of atomic.Pointer[map[string]string] // from a name to the model's own
}

// Canonical returns the one name of a model that engines serve under several. Prompts and sessions
// of all its names are the same: the KV cache does not know the name.
func (p *Pool) Canonical(model string) string {
	if of := p.aliases.of.Load(); of != nil {
		return cmp.Or((*of)[model], model)
	}
	return model
}

// findAliases finds the models with several names anew. An engine of vLLM or SGLang has one base model,
// and lists it under each name with the same root. The first name in alphabetical order is the model's
// own, so that all routers agree.
func (p *Pool) findAliases() {
	a := &p.aliases
	a.mu.Lock()
	defer a.mu.Unlock()
	var groups [][]string
	set := p.Settings.Load()
	for _, w := range p.All() {
		kind := w.Engine().Type
		if kind != engine.VLLM && kind != engine.SGLang || !p.IsUpstream(set, w) {
			continue // another engine may load another model for each name
		}
		for names := range maps.Values(w.List().ByRoot()) {
			if len(names) > 1 {
				groups = append(groups, names)
			}
		}
	}
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
	if len(of) == 0 {
		a.of.Store(nil)
		return
	}
	a.of.Store(&of)
}
