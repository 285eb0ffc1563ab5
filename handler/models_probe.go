package handler

import (
	"context"
	"net/http"

	"github.com/tidwall/gjson"
	"go.uber.org/zap"
)

const (
	pathModels = "/v1/models"
	maxModels  = 4096 // of a worker's list that are read
)

// askModels asks a worker which models it serves. It returns false if there is no
// answer: the worker's list then stays as it is.
func (p *prober) askModels(ctx context.Context, w *worker) (answers bool) {
	status, body, err := p.client.Fetch(ctx, w.dial, http.MethodGet, pathModels, nil, nil, maxModelList)
	if !p.pool.saw(ctx, w, status, err) {
		return false
	}
	closed := status == http.StatusUnauthorized || status == http.StatusForbidden
	if !closed {
		w.refusals.Store(0)
	}
	switch {
	case err != nil:
	case status == http.StatusOK:
		w.learn(readModels(body), p.logger)
	case status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusNotImplemented:
		w.models.Store(nil) // it has no list
	case closed && w.refusals.Add(1) == 1:
		p.logger.Warn("worker tells its models to nobody without its api_key, and is asked less and less", zap.String("upstream", w.dial))
	}
	return true
}

// readModels reads a list of models in OpenAI's form. It returns nil if the body is no
// such list, or the list is empty.
func readModels(body []byte) *modelList {
	data := gjson.GetBytes(body, "data")
	if !gjson.ValidBytes(body) || !data.IsArray() {
		return nil
	}
	list := &modelList{ids: make(map[string]bool)}
	data.ForEach(func(_, entry gjson.Result) bool {
		id := entry.Get("id")
		if id.Type == gjson.String && id.Str != "" && !list.ids[id.Str] {
			list.ids[id.Str] = true
			list.entries = append(list.entries, modelEntry{id: id.Str, raw: entry.Raw})
		}
		return len(list.entries) < maxModels
	})
	if len(list.entries) == 0 {
		return nil
	}
	return list
}
