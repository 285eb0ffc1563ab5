package worker

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// MaxModelList is the longest list of models that the router reads of a worker, in bytes.
const MaxModelList = 1 << 20

// ModelList is a worker's own list of its models.
type ModelList struct {
	Entries []ModelEntry   // in its order
	places  map[string]int // of entries that Add added, by id
}

// ModelEntry is a model's id, its JSON in the list, and its root there. Names with one root may be one
// model.
type ModelEntry struct {
	ID, Raw, Root string
	Adapter       bool // a LoRA adapter of another model
	Loaded        bool // it is loaded now, as the worker says
}

// MaxModels is how many models of a worker's list the router reads.
const MaxModels = 4096

// Add adds a model, unless it is listed already, an operator's terminal could not show its id, or the
// list is full.
func (l *ModelList) Add(e ModelEntry) {
	shown := utf8.ValidString(e.ID) && strings.IndexFunc(e.ID, unicode.IsControl) < 0
	if e.ID != "" && shown && l.Find(e.ID) == nil && len(l.Entries) < MaxModels {
		if l.places == nil {
			l.places = make(map[string]int)
		}
		l.places[e.ID] = len(l.Entries)
		l.Entries = append(l.Entries, e)
	}
}

// Find returns the entry of a model, nil if the list, which may be nil, lacks it. Searching a short list
// is faster than a map.
func (l *ModelList) Find(model string) *ModelEntry {
	switch {
	case l == nil:
	case len(l.places) > 4:
		if i, ok := l.places[model]; ok {
			return &l.Entries[i]
		}
	default:
		for i := range l.Entries {
			if l.Entries[i].ID == model {
				return &l.Entries[i]
			}
		}
	}
	return nil
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
		if e.Root != "" && !e.Adapter {
			names[e.Root] = append(names[e.Root], e.ID)
		}
	}
	return names
}
