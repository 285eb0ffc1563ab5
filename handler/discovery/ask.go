package discovery

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/tidwall/gjson"
)

const (
	// detectTimeout is how long a worker may take to answer the questions about its
	// engine, some five short ones.
	detectTimeout = 3 * time.Second
	pathModels    = "/v1/models"
)

// detect asks a worker about its engine, if that is due. It returns whether it asked.
func (p *Prober) detect(ctx context.Context, w *worker.Worker) bool {
	set := w.Settings()
	if set.Engine == engine.Other || !w.ClaimDetection(time.Now()) {
		return false
	}
	asking, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	get := func(path string) (int, []byte) {
		if path == pathModels && w.RefusesModels() {
			return http.StatusUnauthorized, nil // it was just asked
		}
		status, body, err := p.client.Fetch(asking, w.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if !p.saw(asking, w, status, err) || err != nil && !errors.Is(err, upstream.ErrTooLong) {
			return 0, nil
		}
		return status, body
	}
	var info engine.Info
	kind := w.Engine().Type
	if !engine.Shows(kind) || set.Engine == worker.EngineAuto && w.IsSilent() {
		info = engine.Ask(get)
	} else {
		info = engine.AskAs(kind, get)
	}
	if set.MooncakePort > 0 && w.Engine().Role() == engine.RolePrefill && info.Type != "" {
		p.askMooncake(ctx, w, &info)
	}
	learn(p.pool, w, info)
	return true
}

// askMooncake asks the bootstrap server of a worker's engine for the names of its ranks. They stay while
// there is no answer, for the engine may be busy.
func (p *Prober) askMooncake(ctx context.Context, w *worker.Worker, info *engine.Info) {
	ctx, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	set, noKey := w.Settings(), []string{}
	at := net.JoinHostPort(w.Host(), strconv.Itoa(set.MooncakePort))
	status, body, err := p.client.Fetch(ctx, at, http.MethodGet, engine.PathMooncake, nil, noKey, engine.MaxBody)
	if before := w.Engine().Info; err == nil && status == http.StatusOK {
		info.MooncakeIDs = engine.MooncakeIDs(body, max(1, cmp.Or(set.DPSize, info.DPSize)))
		info.BootID = cmp.Or(info.BootID, info.MooncakeIDs) // which a start changes, too
	} else if info.BootID == "" || info.BootID == before.BootID {
		info.MooncakeIDs = before.MooncakeIDs
	}
}

// askModels asks a worker which models it serves. It returns false if there is no
// answer: the worker's list then stays as it is.
func (p *Prober) askModels(ctx context.Context, w *worker.Worker) (answers bool) {
	status, body, err := p.client.Fetch(ctx, w.Dial, http.MethodGet, pathModels, nil, nil, worker.MaxModelList)
	if !p.saw(ctx, w, status, err) {
		return false
	}
	w.AnsweredListing(status)
	switch {
	case err != nil:
	case status == http.StatusOK:
		p.pool.LearnModels(w, readModels(body), p.logger)
		w.Past.ForgetModels(w.KnownToServe)
	case status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusNotImplemented:
		p.pool.LearnModels(w, nil, p.logger) // it has no list
	}
	return true
}

// readModels reads a list of models in OpenAI's form. It returns nil if the body is no
// such list, or the list is empty.
func readModels(body []byte) *worker.ModelList {
	data := gjson.GetBytes(body, "data")
	if !gjson.ValidBytes(body) || !data.IsArray() {
		return nil
	}
	list := new(worker.ModelList)
	data.ForEach(func(_, entry gjson.Result) bool {
		if id := entry.Get("id"); id.Type == gjson.String {
			parent := entry.Get("parent").Str
			list.Add(worker.ModelEntry{
				ID: id.Str, Raw: entry.Raw, Root: entry.Get("root").Str, Adapter: parent != "" && parent != id.Str,
				Loaded: entry.Get("status.value").Str == "loaded", // llama.cpp's router
			})
		}
		return len(list.Entries) < worker.MaxModels
	})
	if len(list.Entries) == 0 {
		return nil
	}
	return list
}
