package handler

import (
	"context"
	"io"
	"maps"
	"net/http"
	"strings"

	"github.com/tidwall/gjson"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	maxModelList = 1 << 20 // bytes of one worker's list
	maxModels    = 4096    // in it
)

// modelList is what a worker serves, as it told.
type modelList struct {
	ids     map[string]bool
	entries []modelEntry // in its order
}

type modelEntry struct {
	id, raw string
}

// serves tells whether a worker serves a model, and whether that is known.
func (w *worker) serves(model string) (yes, known bool) {
	if set := w.configured.Load(); set != nil {
		return (*set)[model], true
	}
	if list := w.models.Load(); list != nil {
		return list.ids[model], true
	}
	return false, false
}

// modelRule is how a request's model limits its candidates:
// workers that are known to serve it, if there are any; else those that may;
// else all, for engines often serve models by other names than they list.
type modelRule uint8

const (
	anyWorker modelRule = iota
	onlyKnown
	onlyUnknown
)

// ruleFor returns the rule for a request among the upstreams.
func (rt *route) ruleFor(pool reverseproxy.UpstreamPool) modelRule {
	if rt.plan.model == "" || len(pool) < 2 && rt.h.ReverseProxy.DynamicUpstreams == nil {
		return anyWorker
	}
	rule := anyWorker
	for _, up := range pool {
		switch yes, known := rt.worker(up).serves(rt.plan.model); {
		case yes:
			return onlyKnown
		case !known:
			rule = onlyUnknown
		}
	}
	return rule
}

// fits tells whether the rule lets a worker serve the request.
func (rt *route) fits(w *worker) bool {
	if rt.rule == anyWorker {
		return true
	}
	yes, known := w.serves(rt.plan.model)
	return yes || rt.rule == onlyUnknown && !known
}

// nobodyServes tells whether the operator has said of all workers which models
// they serve, and no worker serves this one.
func (h *Handler) nobodyServes(model string) bool {
	if model == "" || h.ReverseProxy.DynamicUpstreams != nil || len(h.ReverseProxy.Upstreams) == 0 {
		return false
	}
	for _, up := range h.ReverseProxy.Upstreams {
		if strings.Contains(up.Dial, "{") {
			return false
		}
		set := h.pool.peek(up.Dial).configured.Load()
		if set == nil || (*set)[model] {
			return false
		}
	}
	return true
}

// modelOf returns the model that a request for one model's card names.
func modelOf(r *http.Request) string {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return ""
	}
	if _, id, ok := strings.Cut(r.URL.Path, "/models/"); ok {
		return id
	}
	return ""
}

// listsModels tells whether a request asks for the list of models.
func listsModels(r *http.Request) bool {
	return r.Method == http.MethodGet && (r.URL.Path == "/models" || strings.HasSuffix(r.URL.Path, "/v1/models"))
}

// ask takes in which models a worker serves. A worker that does not answer
// serves what it served before.
func (h *Handler) ask(ctx context.Context, w *worker) {
	resp, err := h.get(ctx, w, "/v1/models")
	if err != nil {
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxModelList))
	switch {
	case err != nil:
	case resp.StatusCode == http.StatusOK:
		w.learn(readModels(body), h.logger)
	case resp.StatusCode < 500:
		w.models.Store(nil) // it does not tell
	}
}

// learn takes in a worker's list.
func (w *worker) learn(list *modelList, logger *zap.Logger) {
	old := w.models.Swap(list)
	if list == nil || old != nil && maps.Equal(old.ids, list.ids) {
		return
	}
	ids := make([]string, 0, len(list.entries))
	for _, e := range list.entries {
		ids = append(ids, e.id)
	}
	logger.Info("worker serves models", zap.String("upstream", w.dial), zap.Strings("models", ids))
}

// readModels reads a list of models in OpenAI's form; nil if it is none, or is
// empty.
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

// mergeModels adds to one worker's list of models those that only others
// serve. What it cannot read stays as it is.
func (rt *route) mergeModels(resp *http.Response) {
	if resp.StatusCode != http.StatusOK || compressed(resp.Header) {
		return
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxModelList+1))
	rest := io.MultiReader(strings.NewReader(string(body)), errorReader{err}, resp.Body)
	whole := err == nil && len(body) <= maxModelList
	list := readModels(body)
	if whole && (list != nil || gjson.GetBytes(body, "data.#").Exists()) {
		rest = io.MultiReader(strings.NewReader(rt.merged(body, list)))
		resp.ContentLength = -1
		resp.Header.Del("Content-Length")
		resp.Header.Del("Etag")
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{rest, resp.Body}
}

// errorReader gives an error, or the end.
type errorReader struct{ err error }

// Read implements io.Reader.
func (e errorReader) Read([]byte) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	return 0, io.EOF
}

// merged returns the body with the other workers' models in it. The bytes that
// were there stay.
func (rt *route) merged(body []byte, list *modelList) string {
	known := make(map[string]bool)
	if list != nil {
		known = list.ids
	}
	data := gjson.GetBytes(body, "data")
	end := data.Index + len(data.Raw) - 1
	if data.Index == 0 {
		return string(body)
	}
	var b strings.Builder
	b.Write(body[:end])
	empty := !data.Get("0").Exists()
	for _, w := range rt.workersOffered() {
		theirs := w.models.Load()
		if theirs == nil {
			continue
		}
		for _, e := range theirs.entries {
			if known[e.id] {
				continue
			}
			known[e.id] = true
			if !empty {
				b.WriteByte(',')
			}
			empty = false
			b.WriteString(e.raw)
		}
	}
	b.Write(body[end:])
	return b.String()
}
