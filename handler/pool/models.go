package pool

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// MaxModelList is the longest list of one worker that is read, in bytes.
const MaxModelList = 1 << 20

// ModelList is the worker's own list of what it serves.
type ModelList struct {
	IDs     map[string]bool
	Entries []ModelEntry // in its order
}

type ModelEntry struct {
	ID, Raw string
}

// Serves returns whether a worker serves a model, and whether that is known.
func (w *Worker) Serves(model string) (yes, known bool) {
	if set := w.Configured.Load(); set != nil {
		return (*set)[model], true
	}
	if list := w.Models.Load(); list != nil {
		return list.has(model), true
	}
	return false, false
}

// has returns whether a model is in the list. A short list is searched sooner than a map.
func (l *ModelList) has(model string) bool {
	if len(l.Entries) == 0 || len(l.Entries) > 4 {
		return l.IDs[model]
	}
	return slices.ContainsFunc(l.Entries, func(e ModelEntry) bool { return e.ID == model })
}

// NoneServes returns whether the operator lists the models of all workers behind the
// upstreams, and this model is not among them.
func (p *Pool) NoneServes(ups reverseproxy.UpstreamPool, model string) bool {
	for _, up := range ups {
		if strings.Contains(up.Dial, "{") {
			return false
		}
		set := p.peek(up.Dial).Configured.Load()
		if set == nil || (*set)[model] {
			return false
		}
	}
	return true
}

// Learn records a worker's list, nil if it has none, unless it is unchanged.
func (w *Worker) Learn(list *ModelList, logger *zap.Logger) {
	old := w.Models.Load()
	same := old != nil && list != nil && maps.Equal(old.IDs, list.IDs)
	if same && slices.Equal(old.Entries, list.Entries) {
		return
	}
	w.Models.Store(list)
	if same || list == nil {
		return
	}
	ids := make([]string, 0, len(list.Entries))
	for _, e := range list.Entries {
		ids = append(ids, e.ID)
	}
	logger.Info("worker serves models", zap.String("upstream", w.Dial), zap.Strings("models", ids))
}

// ModelsBeside returns the id and the JSON of each model that the workers serve. It
// leaves out workers with another API key than the one that answers, which is what
// clients are judged by.
func (p *Pool) ModelsBeside(answers *Worker, workers []*Worker) iter.Seq2[string, string] {
	return func(yield func(id, raw string) bool) {
		set := p.Settings.Load()
		key := set.Worker(answers.Dial).APIKey
		for _, w := range workers {
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

// listed returns the models that a worker serves: those that the operator lists, else
// those that the worker lists.
func (w *Worker) listed() []ModelEntry {
	told := w.Models.Load()
	if told == nil {
		told = new(ModelList)
	}
	set := w.Configured.Load()
	if set == nil {
		return told.Entries
	}
	list := make([]ModelEntry, 0, len(*set))
	for _, id := range slices.Sorted(maps.Keys(*set)) {
		i := slices.IndexFunc(told.Entries, func(e ModelEntry) bool { return e.ID == id })
		if i >= 0 {
			list = append(list, told.Entries[i])
			continue
		}
		name := rawjson.AppendString(nil, id)
		list = append(list, ModelEntry{id, `{"id":` + string(name) + `,"object":"model","created":0,"owned_by":"kv_router"}`})
	}
	return list
}
