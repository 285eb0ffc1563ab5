package pool

import (
	"iter"
	"maps"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Lists returns whether any worker is known to serve a model.
func (r *registry) Lists(model string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, w := range r.workers {
		if w.KnownToServe(model) {
			return true
		}
	}
	return false
}

// NoneServes returns whether the operator lists the models of all workers behind the
// upstreams, and no list has this model.
func (r *registry) NoneServes(ups reverseproxy.UpstreamPool, model string) bool {
	for _, up := range ups {
		if strings.Contains(up.Dial, "{") {
			return false
		}
		w := r.peek(up.Dial)
		if !w.HasConfiguredModels() || w.KnownToServe(model) {
			return false
		}
	}
	return true
}

// Adapter returns the name of the LoRA adapter that a model's name stands for in any worker's
// list, or for SGLang in the form base:adapter. It is empty if there is none. It is unknown if
// workers have lists and none has the model: engines load adapters without listing them.
func (r *registry) Adapter(model string) (name string, known bool) {
	if model == "" {
		return "", true
	}
	known = true
	r.mu.RLock()
	defer r.mu.RUnlock()
	base, adapter, isPair := strings.Cut(model, ":")
	for _, w := range r.workers {
		list := w.List()
		if list == nil {
			continue
		}
		switch e := list.Find(model); {
		case e != nil && e.Adapter:
			return model, true
		case e != nil:
			return "", true
		case isPair && adapter != "" && list.Find(base) != nil:
			return adapter, true
		}
		known = false
	}
	return "", known
}

// OnlyModel returns the model that requests mean which name none: the one that all workers list
// beside adapters, by its canonical name. It is empty if there is none, or several.
func (r *registry) OnlyModel() (model string) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, w := range r.workers {
		if w.IsBackup() {
			continue
		}
		for _, id := range w.BaseModels() {
			name := r.Canonical(id)
			if model != "" && name != model {
				return ""
			}
			model = name
		}
	}
	return model
}

// ModelsBeside returns the id and the JSON of each model that the offered workers serve. It leaves
// out workers with another API key than the worker that answers: the client may have no
// access to them.
func (r *registry) ModelsBeside(answers *worker.Worker, o Offers) iter.Seq2[string, string] {
	return func(yield func(id, raw string) bool) {
		for i := range o.Table.Rows {
			w := o.Table.Rows[i].Worker
			if w.Settings().APIKey != answers.Settings().APIKey {
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

// findAliases finds the models with several names again. An engine of vLLM or SGLang has one base model,
// and lists it under each name with the same root.
func (r *registry) findAliases() {
	r.finding.Lock()
	defer r.finding.Unlock()
	var groups [][]string
	set := r.Settings.Load()
	for _, w := range r.All() {
		kind := w.Engine().Type
		if kind != engine.VLLM && kind != engine.SGLang || !r.IsUpstream(set, w) {
			continue // another engine may load another model for each name
		}
		for names := range maps.Values(w.List().ByRoot()) {
			if len(names) > 1 {
				groups = append(groups, names)
			}
		}
	}
	r.found(groups)
}

// KeeperServes returns whether the worker that keeps something of an id is known to serve a model.
func (p *Pool) KeeperServes(id, model string) bool {
	at, _, ok := p.Responses.Find(id, false)
	w := p.ByID(at.Worker)
	return ok && w != nil && w.KnownToServe(model)
}
