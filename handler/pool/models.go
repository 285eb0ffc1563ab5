package pool

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

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

// NoneServes returns whether the operator lists the models of all workers behind the
// upstreams, and no list has this model.
func (p *Pool) NoneServes(ups reverseproxy.UpstreamPool, model string) bool {
	for _, up := range ups {
		if strings.Contains(up.Dial, "{") {
			return false
		}
		w := p.peek(up.Dial)
		if !w.HasConfiguredModels() || w.KnownToServe(model) {
			return false
		}
	}
	return true
}

// LearnModels records a worker's list of models, nil if it has none. It logs a change, and the journal
// keeps it.
func (p *Pool) LearnModels(w *Worker, list *ModelList, logger *zap.Logger) {
	old := w.List()
	same := old != nil && list != nil && maps.Equal(old.IDs, list.IDs)
	if same && slices.Equal(old.Entries, list.Entries) {
		return
	}
	w.SetList(list)
	p.findAliases()
	if same || list == nil && old == nil {
		return
	}
	p.kept.journal.Lists(w.ID, keptModels(list))
	if list == nil {
		return
	}
	ids := make([]string, 0, len(list.Entries))
	for _, e := range list.Entries {
		ids = append(ids, e.ID)
	}
	logger.Info("worker serves models", zap.String("upstream", w.Dial), zap.Strings("models", ids))
}

// keptModels returns a list as the journal keeps it.
func keptModels(l *ModelList) (models []journal.Model) {
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
func recallModels(w *Worker, models []journal.Model) {
	list := new(ModelList)
	for _, m := range models {
		list.Add(worker.EntryOf(m.ID), m.Adapter)
	}
	w.RecallList(list)
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
			for _, e := range w.Listed() {
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
		list := w.List()
		if list == nil {
			continue
		}
		switch {
		case list.Adapters[model]:
			return model, true
		case list.Has(model):
			return "", true
		case isPair && adapter != "" && list.Has(base):
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
		own := w.List()
		for _, e := range w.Listed() {
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
