package worker

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// MaxModelList is the longest list of models that the router reads of a worker, in bytes.
const MaxModelList = 1 << 20

// ModelList is a worker's own list of its models.
type ModelList struct {
	IDs map[string]bool
	// Adapters are those of IDs that are LoRA adapters of another model.
	Adapters map[string]bool
	// Loaded are those of IDs that are loaded now, if the worker says that.
	Loaded  map[string]bool
	Entries []ModelEntry // in its order
}

// ModelEntry is a model's id, its JSON in the list, and its root there. Names with one root may be one
// model.
type ModelEntry struct {
	ID, Raw, Root string
}

// MaxModels is how many models of a worker's list the router reads.
const MaxModels = 4096

// Add adds a model, unless it is listed already, an operator's terminal could not show its id, or the
// list is full.
func (l *ModelList) Add(e ModelEntry, adapter bool) {
	shown := utf8.ValidString(e.ID) && strings.IndexFunc(e.ID, unicode.IsControl) < 0
	if e.ID == "" || !shown || l.IDs[e.ID] || len(l.Entries) == MaxModels {
		return
	}
	if l.IDs == nil {
		l.IDs, l.Adapters = make(map[string]bool), make(map[string]bool)
	}
	l.IDs[e.ID] = true
	l.Entries = append(l.Entries, e)
	if adapter {
		l.Adapters[e.ID] = true
	}
}

// Has returns whether a model is in the list. Searching a short list is faster than a map.
func (l *ModelList) Has(model string) bool {
	if len(l.Entries) == 0 || len(l.Entries) > 4 {
		return l.IDs[model]
	}
	return slices.ContainsFunc(l.Entries, func(e ModelEntry) bool { return e.ID == model })
}

// EntryOf returns the entry of a model of which only the id is known.
func EntryOf(id string) ModelEntry {
	name := rawjson.AppendString(nil, id)
	return ModelEntry{ID: id, Raw: `{"id":` + string(name) + `,"object":"model","created":0,"owned_by":"kv_router"}`}
}

// ByRoot returns the names of models beside adapters, by the root that the engine lists for them.
func (l *ModelList) ByRoot() map[string][]string {
	names := make(map[string][]string)
	if l == nil {
		return names
	}
	for _, e := range l.Entries {
		if e.Root != "" && !l.Adapters[e.ID] {
			names[e.Root] = append(names[e.Root], e.ID)
		}
	}
	return names
}
