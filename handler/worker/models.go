package worker

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// Serves returns whether a worker serves a model, and whether that is known.
func (w *Worker) Serves(model string) (yes, known bool) {
	if set := w.Settings().Models; len(set) > 0 {
		return slices.Contains(set, model), true
	}
	list := w.list.Load()
	return list.Find(model) != nil, list != nil
}

// ModelsOf returns the sorted ids of the worker's models: those of the operator's list, and those
// of its own. A list that does not exist is nil.
func (w *Worker) ModelsOf() (configured, own []string) {
	if list := w.list.Load(); list != nil {
		own = make([]string, 0, len(list.Entries))
		for _, e := range list.Entries {
			own = append(own, e.ID)
		}
		slices.Sort(own)
	}
	return w.configured(), own
}

// configured returns the operator's list, sorted; nil if there is none.
func (w *Worker) configured() []string {
	return slices.Compact(slices.Sorted(slices.Values(w.Settings().Models)))
}

// HasConfiguredModels returns whether the operator lists the worker's models.
func (w *Worker) HasConfiguredModels() bool { return len(w.Settings().Models) > 0 }

// KnownToServe returns whether a worker is known to serve a model.
func (w *Worker) KnownToServe(model string) bool {
	yes, _ := w.Serves(model)
	return yes
}

// List returns the worker's own list of its models, nil if it has none. The caller must not change it.
func (w *Worker) List() *ModelList { return w.list.Load() }

// SetList replaces the list of the worker's own models.
func (w *Worker) SetList(list *ModelList) { w.list.Store(list) }

// RecallList takes over the list that the worker had in an earlier run, or for another router,
// until the worker answers.
func (w *Worker) RecallList(list *ModelList) {
	if len(list.Entries) > 0 && w.Health.Reach() != Reachable {
		w.list.CompareAndSwap(nil, list)
	}
}

// Listed returns the models that the operator lists, or else those that the worker lists.
func (w *Worker) Listed() []ModelEntry {
	own, set := w.list.Load(), w.configured()
	if set == nil {
		if own == nil {
			return nil
		}
		return own.Entries
	}
	list := make([]ModelEntry, 0, len(set))
	for _, id := range set {
		if e := own.Find(id); e != nil {
			list = append(list, *e)
		} else {
			list = append(list, EntryOf(id))
		}
	}
	return list
}

// BaseModels returns the ids of the models that the worker lists, without adapters.
func (w *Worker) BaseModels() (ids []string) {
	for _, e := range w.Listed() {
		if !e.Adapter {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// ModelMetrics returns the metrics of the worker for a model.
func (w *Worker) ModelMetrics(model string) *observe.ModelMetrics {
	return w.Past.ModelMetrics(model, w.KnownToServe(model))
}

// LoadsOnDemand returns whether the worker loads models on demand, such as Ollama, llama-swap or llama.cpp's
// router. It then lists several, and its engine is of no type that has one base model for its life. To load
// another model takes seconds, and may push out the present one.
func (w *Worker) LoadsOnDemand() bool {
	list := w.list.Load()
	if list == nil || w.known.Load().one {
		return false
	}
	bases := 0
	for i := range list.Entries { // no further than needed: each choice asks, and a list may be long
		if !list.Entries[i].Adapter {
			if bases++; bases > 1 {
				return true
			}
		}
	}
	return false
}

// Requested records that the worker gets a request for a model.
func (w *Worker) Requested(model string) {
	if last := w.requested.Load(); model != "" && (last == nil || *last != model) && w.LoadsOnDemand() {
		loaded := model // a parameter with an address would be on the heap for each request
		w.requested.Store(&loaded)
	}
}

// LoadFactor returns the factor of the worker's cost for a model.
func (w *Worker) LoadFactor(model string) float64 {
	if model == "" || !w.LoadsOnDemand() {
		return 1
	}
	last, list := w.requested.Load(), w.list.Load()
	e := list.Find(model)
	switch {
	case last != nil && *last == model, e != nil && e.Loaded:
		return 1
	case last == nil && list != nil && !slices.ContainsFunc(list.Entries, func(e ModelEntry) bool { return e.Loaded }):
		return mustLoad
	}
	return mustSwap
}

// Factors of the cost of a worker that must load the model first, and of one that would push out
// another model for it. Both together are more than few requests that wait for a loaded model.
const mustLoad, mustSwap = 5, 10
