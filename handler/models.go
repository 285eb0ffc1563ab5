package handler

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// maxModelList is the longest list of one worker that is read, in bytes.
const maxModelList = 1 << 20

// modelList is the worker's own list of what it serves.
type modelList struct {
	ids     map[string]bool
	entries []modelEntry // in its order
}

type modelEntry struct {
	id, raw string
}

// serves returns whether a worker serves a model, and whether that is known.
func (w *worker) serves(model string) (yes, known bool) {
	if set := w.configured.Load(); set != nil {
		return (*set)[model], true
	}
	if list := w.models.Load(); list != nil {
		return list.has(model), true
	}
	return false, false
}

// has returns whether a model is in the list. A short list is searched sooner than a map.
func (l *modelList) has(model string) bool {
	if len(l.entries) == 0 || len(l.entries) > 4 {
		return l.ids[model]
	}
	for i := range l.entries {
		if l.entries[i].id == model {
			return true
		}
	}
	return false
}

// noneServes returns whether the operator lists the models of all workers behind the
// upstreams, and this model is not among them.
func (p *pool) noneServes(ups reverseproxy.UpstreamPool, model string) bool {
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

// learn records a worker's list, nil if it has none, unless it is unchanged.
func (w *worker) learn(list *modelList, logger *zap.Logger) {
	old := w.models.Load()
	same := old != nil && list != nil && maps.Equal(old.ids, list.ids)
	if same && slices.Equal(old.entries, list.entries) {
		return
	}
	w.models.Store(list)
	if same || list == nil {
		return
	}
	ids := make([]string, 0, len(list.entries))
	for _, e := range list.entries {
		ids = append(ids, e.id)
	}
	logger.Info("worker serves models", zap.String("upstream", w.dial), zap.Strings("models", ids))
}

// modelsBeside returns the id and the JSON of each model that the workers serve. It
// leaves out workers with another API key than the one that answers, which is what
// clients are judged by.
func (p *pool) modelsBeside(answers *worker, workers []*worker) iter.Seq2[string, string] {
	return func(yield func(id, raw string) bool) {
		set := p.settings.Load()
		key := set.worker(answers.dial).APIKey
		for _, w := range workers {
			if set.worker(w.dial).APIKey != key {
				continue
			}
			for _, e := range w.listed() {
				if !yield(e.id, e.raw) {
					return
				}
			}
		}
	}
}

// listed returns the models that a worker serves: those that the operator lists, else
// those that the worker lists.
func (w *worker) listed() []modelEntry {
	told := w.models.Load()
	if told == nil {
		told = new(modelList)
	}
	set := w.configured.Load()
	if set == nil {
		return told.entries
	}
	list := make([]modelEntry, 0, len(*set))
	for _, id := range slices.Sorted(maps.Keys(*set)) {
		i := slices.IndexFunc(told.entries, func(e modelEntry) bool { return e.id == id })
		if i >= 0 {
			list = append(list, told.entries[i])
			continue
		}
		name := rawjson.AppendString(nil, id)
		list = append(list, modelEntry{id, `{"id":` + string(name) + `,"object":"model","created":0,"owned_by":"kv_router"}`})
	}
	return list
}
