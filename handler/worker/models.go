package worker

import (
	"maps"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// Serves returns whether a worker serves a model, and whether that is known.
func (w *Worker) Serves(model string) (yes, known bool) {
	if set := w.known.Load().models; set != nil {
		return set[model], true
	}
	if list := w.list.Load(); list != nil {
		return list.Has(model), true
	}
	return false, false
}

// ModelsOf returns the sorted ids of the worker's models: those of the operator's list, and those
// of its own. A list that does not exist is nil.
func (w *Worker) ModelsOf() (configured, own []string) {
	if set := w.known.Load().models; set != nil {
		configured = slices.Sorted(maps.Keys(set))
	}
	if list := w.list.Load(); list != nil {
		own = slices.Sorted(maps.Keys(list.IDs))
	}
	return configured, own
}

// HasConfiguredModels returns whether the operator lists the worker's models.
func (w *Worker) HasConfiguredModels() bool { return w.known.Load().models != nil }

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
	var own []ModelEntry
	if l := w.list.Load(); l != nil {
		own = l.Entries
	}
	set := w.known.Load().models
	if set == nil {
		return own
	}
	list := make([]ModelEntry, 0, len(set))
	for _, id := range slices.Sorted(maps.Keys(set)) {
		if i := slices.IndexFunc(own, func(e ModelEntry) bool { return e.ID == id }); i >= 0 {
			list = append(list, own[i])
			continue
		}
		list = append(list, EntryOf(id))
	}
	return list
}

// BaseModels returns the ids of the models that the worker lists, without adapters.
func (w *Worker) BaseModels() (ids []string) {
	list := w.list.Load()
	for _, e := range w.Listed() {
		if list == nil || !list.Adapters[e.ID] {
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
	return list != nil && len(list.Entries)-len(list.Adapters) > 1 && !w.known.Load().one
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
	switch {
	case last != nil && *last == model, list != nil && list.Loaded[model]:
		return 1
	case last == nil && list != nil && len(list.Loaded) == 0:
		return mustLoad
	}
	return mustSwap
}

// Factors of the cost of a worker that must load the model first, and of one that would push out
// another model for it. Both together are more than few requests that wait for a loaded model.
const mustLoad, mustSwap = 5, 10
