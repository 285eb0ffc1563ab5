package discovery

import (
	"context"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/tidwall/gjson"
	"go.uber.org/zap"
)

const (
	pathModels = "/v1/models"
	maxModels  = 4096 // of a worker's list that are read
)

// askModels asks a worker which models it serves. It returns false if there is no
// answer: the worker's list then stays as it is.
func (p *Prober) askModels(ctx context.Context, w *pool.Worker) (answers bool) {
	status, body, err := p.client.Fetch(ctx, w.Dial, http.MethodGet, pathModels, nil, nil, pool.MaxModelList)
	if !p.saw(ctx, w, status, err) {
		return false
	}
	closed := status == http.StatusUnauthorized || status == http.StatusForbidden
	if !closed {
		w.Refusals.Store(0)
	}
	switch {
	case err != nil:
	case status == http.StatusOK:
		w.Learn(readModels(body), p.logger)
	case status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusNotImplemented:
		w.Models.Store(nil) // it has no list
	case closed && w.Refusals.Add(1) == 1:
		p.logger.Warn("worker tells its models to nobody without its api_key, and is asked less and less", zap.String("upstream", w.Dial))
	}
	return true
}

// readModels reads a list of models in OpenAI's form. It returns nil if the body is no
// such list, or the list is empty.
func readModels(body []byte) *pool.ModelList {
	data := gjson.GetBytes(body, "data")
	if !gjson.ValidBytes(body) || !data.IsArray() {
		return nil
	}
	list := &pool.ModelList{IDs: make(map[string]bool)}
	data.ForEach(func(_, entry gjson.Result) bool {
		id := entry.Get("id")
		if id.Type == gjson.String && id.Str != "" && !list.IDs[id.Str] {
			list.IDs[id.Str] = true
			list.Entries = append(list.Entries, pool.ModelEntry{ID: id.Str, Raw: entry.Raw})
		}
		return len(list.Entries) < maxModels
	})
	if len(list.Entries) == 0 {
		return nil
	}
	return list
}
