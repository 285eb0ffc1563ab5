package pool

import (
	"iter"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
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

// Serves returns whether a worker serves a model, and whether that is known.
func (w *Worker) Serves(model string) (yes, known bool) {
	if set := w.configured.Load(); set != nil {
		return (*set)[model], true
	}
	if list := w.list.Load(); list != nil {
		return list.has(model), true
	}
	return false, false
}

// ModelsOf returns the sorted ids of the worker's models: those of the operator's list, and those
// of its own. A list that does not exist is nil.
func (w *Worker) ModelsOf() (configured, own []string) {
	if set := w.configured.Load(); set != nil {
		configured = slices.Sorted(maps.Keys(*set))
	}
	if list := w.list.Load(); list != nil {
		own = slices.Sorted(maps.Keys(list.IDs))
	}
	return configured, own
}

// HasConfiguredModels returns whether the operator lists the worker's models.
func (w *Worker) HasConfiguredModels() bool { return w.configured.Load() != nil }

// KnownToServe returns whether a worker is known to serve a model.
func (w *Worker) KnownToServe(model string) bool {
	yes, _ := w.Serves(model)
	return yes
}

// Lists returns whether any worker is known to serve a model.
func (p *Pool) Lists(model string) bool {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	for _, w := range p.workers {
		if w.KnownToServe(model) {
			return true
		}
	}
	return false
}

// has returns whether a model is in the list. Searching a short list is faster than a map.
func (l *ModelList) has(model string) bool {
	if len(l.Entries) == 0 || len(l.Entries) > 4 {
		return l.IDs[model]
	}
	return slices.ContainsFunc(l.Entries, func(e ModelEntry) bool { return e.ID == model })
}

// NoneServes returns whether the operator lists the models of all workers behind the
// upstreams, and no list has this model.
func (p *Pool) NoneServes(ups reverseproxy.UpstreamPool, model string) bool {
	for _, up := range ups {
		if strings.Contains(up.Dial, "{") {
			return false
		}
		set := p.peek(up.Dial).configured.Load()
		if set == nil || (*set)[model] {
			return false
		}
	}
	return true
}

// LearnModels records a worker's list of models, nil if it has none. It logs a change, and the journal
// keeps it.
func (p *Pool) LearnModels(w *Worker, list *ModelList, logger *zap.Logger) {
	old := w.list.Load()
	same := old != nil && list != nil && maps.Equal(old.IDs, list.IDs)
	if same && slices.Equal(old.Entries, list.Entries) {
		return
	}
	w.list.Store(list)
	w.findOnDemand()
	p.findAliases()
	if same || list == nil && old == nil {
		return
	}
	p.kept.journal.Lists(w.ID, list.kept())
	if list == nil {
		return
	}
	ids := make([]string, 0, len(list.Entries))
	for _, e := range list.Entries {
		ids = append(ids, e.ID)
	}
	logger.Info("worker serves models", zap.String("upstream", w.Dial), zap.Strings("models", ids))
}

// kept returns the list as the journal keeps it.
func (l *ModelList) kept() (models []journal.Model) {
	if l == nil {
		return nil
	}
	for _, e := range l.Entries {
		models = append(models, journal.Model{ID: e.ID, Adapter: l.Adapters[e.ID]})
	}
	return models
}

// recallModels takes over the list that the worker had in an earlier run, or for another router,
// until the worker answers.
func (w *Worker) recallModels(models []journal.Model) {
	if len(models) == 0 || w.Health.Reach() == reachable {
		return
	}
	list := new(ModelList)
	for _, m := range models {
		list.Add(entryOf(m.ID), m.Adapter)
	}
	w.list.CompareAndSwap(nil, list)
}

// entryOf returns the entry of a model of which only the id is known.
func entryOf(id string) ModelEntry {
	name := rawjson.AppendString(nil, id)
	return ModelEntry{ID: id, Raw: `{"id":` + string(name) + `,"object":"model","created":0,"owned_by":"kv_router"}`}
}

// ModelsBeside returns the id and the JSON of each model that the offered workers serve. It leaves
// out workers with another API key than the worker that answers: the client may have no
// access to them.
func (p *Pool) ModelsBeside(answers *Worker, o Offers) iter.Seq2[string, string] {
	return func(yield func(id, raw string) bool) {
		set := p.Settings.Load()
		key := set.Worker(answers.Dial).APIKey
		for i := range o.Table.Rows {
			w := o.Table.Rows[i].Worker
			if set.Worker(w.Dial).APIKey != key {
				continue
			}
			for _, e := range w.listed() {
				if !yield(e.ID, e.Raw) {
					return
				}
			}
		}
	}
}

// Adapter returns the name of the LoRA adapter that a model's name stands for in any worker's
// list, or for SGLang in the form base:adapter. It is empty if there is none. It is unknown if
// workers have lists and none has the model: engines load adapters without listing them.
func (p *Pool) Adapter(model string) (name string, known bool) {
	if model == "" {
		return "", true
	}
	known = true
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	base, adapter, isPair := strings.Cut(model, ":")
	for _, w := range p.workers {
		list := w.list.Load()
		if list == nil {
			continue
		}
		switch {
		case list.Adapters[model]:
			return model, true
		case list.has(model):
			return "", true
		case isPair && adapter != "" && list.has(base):
			return adapter, true
		}
		known = false
	}
	return "", known
}

// OnlyModel returns the model that requests mean which name none: the one that all workers list
// beside adapters, by its canonical name. It is empty if there is none, or several.
func (p *Pool) OnlyModel() (model string) {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	for _, w := range p.workers {
		own := w.list.Load()
		for _, e := range w.listed() {
			if own != nil && own.Adapters[e.ID] {
				continue
			}
			name := p.Canonical(e.ID)
			if model != "" && name != model {
				return ""
			}
			model = name
		}
	}
	return model
}

// listed returns the models that the operator lists, or else those that the worker lists.
func (w *Worker) listed() []ModelEntry {
	var own []ModelEntry
	if l := w.list.Load(); l != nil {
		own = l.Entries
	}
	set := w.configured.Load()
	if set == nil {
		return own
	}
	list := make([]ModelEntry, 0, len(*set))
	for _, id := range slices.Sorted(maps.Keys(*set)) {
		if i := slices.IndexFunc(own, func(e ModelEntry) bool { return e.ID == id }); i >= 0 {
			list = append(list, own[i])
			continue
		}
		list = append(list, entryOf(id))
	}
	return list
}
