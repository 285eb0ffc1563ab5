// Package admin is the part of Caddy's admin API that shows and steers pools: workers,
// sessions, explanations and queries. It also collects the metrics that are read from
// pools. What the fields of its answers mean stands in testdata/fields.txt.
package admin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(Admin{})
}

// Admin is what kv_router adds to Caddy's admin endpoint, below `/kv_router/`. It shows pools, workers,
// sessions and choices, and explains where a request would go. It drains workers and binds sessions. The
// manual's page on the admin API has all requests and fields.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.kv_router", New: func() caddy.Module { return new(Admin) }}
}

// Routes returns the routes. They keep nothing of their configuration: Caddy makes them
// before it accepts or rejects that, and keeps them in both cases.
func (Admin) Routes() []caddy.AdminRoute {
	const one = "/kv_router/pools/{pool}"
	return []caddy.AdminRoute{
		{Pattern: "/kv_router/", Handler: caddy.AdminHandlerFunc(notThere)},
		{Pattern: "/kv_router/{$}", Handler: caddy.AdminHandlerFunc(adminPage)},
		{Pattern: "/kv_router/ready", Handler: methods{http.MethodGet: getReady}},
		{Pattern: "/kv_router/pools", Handler: methods{http.MethodGet: getPools}},
		{Pattern: one, Handler: methods{http.MethodGet: ofPool(getPool)}},
		{Pattern: one + "/state", Handler: methods{http.MethodGet: ofPool(getState)}},
		{Pattern: one + "/choices", Handler: methods{http.MethodGet: ofPool(getChoices)}},
		{Pattern: one + "/workers", Handler: methods{http.MethodGet: ofPool(getWorkers)}},
		{Pattern: one + "/workers/{worker}", Handler: methods{http.MethodGet: ofWorker(nil)}},
		{Pattern: one + "/workers/{worker}/drain", Handler: methods{http.MethodPost: ofWorker(drain)}},
		{Pattern: one + "/workers/{worker}/undrain", Handler: methods{http.MethodPost: ofWorker(undrain)}},
		{Pattern: one + "/sessions", Handler: methods{http.MethodGet: ofPool(getSessions)}},
		{Pattern: one + "/sessions/{key}", Handler: methods{
			http.MethodGet: ofSession(nil), http.MethodPut: ofSession(rebind), http.MethodDelete: ofSession(unbind),
		}},
		{Pattern: one + "/call", Handler: methods{http.MethodPost: ofPool(callWorkers)}},
		{Pattern: one + "/explain", Handler: methods{http.MethodPost: ofPool(explain)}},
	}
}

type answerer func(*http.Request) (any, error)

// ownSite refuses what other sites have a browser send. Caddy checks the origin only of requests
// that name one, and of none that a form of another site sends.
var ownSite = http.NewCrossOriginProtection()

type methods map[string]answerer

// ServeHTTP implements caddy.AdminHandler.
func (m methods) ServeHTTP(w http.ResponseWriter, r *http.Request) error {
	f := m[r.Method]
	if f == nil {
		allowed := slices.Sorted(maps.Keys(m))
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return apiError(http.StatusMethodNotAllowed,
			"method %s is not allowed: use %s", r.Method, strings.Join(allowed, " or "))
	}
	if err := ownSite.Check(r); err != nil {
		return apiError(http.StatusForbidden, "%w", err)
	}
	v, err := f(r)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("encoding the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	_, err = w.Write(b.Bytes()) //nolint:gosec // JSON, and said to be
	return err
}

func apiError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

func notThere(_ http.ResponseWriter, r *http.Request) error {
	return apiError(http.StatusNotFound, "%s is not there; begin with /kv_router/pools", r.URL.Path)
}

func sortedPools() []*pool.Pool {
	var list []*pool.Pool
	pool.Pools.Range(func(_, value any) bool {
		if p, ok := value.(*pool.Pool); ok {
			list = append(list, p)
		}
		return true
	})
	slices.SortFunc(list, func(a, b *pool.Pool) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// ofPool calls f with the pool that the path names. The default name is also that of the only pool.
func ofPool(f func(*http.Request, *pool.Pool) (any, error)) answerer {
	return func(r *http.Request) (any, error) {
		name, all := r.PathValue("pool"), sortedPools()
		names := make([]string, 0, len(all))
		for _, p := range all {
			if p.Name == name || name == pool.DefaultName && len(all) == 1 {
				return f(r, p)
			}
			names = append(names, p.Name)
		}
		return nil, apiError(http.StatusNotFound, "no pool has the name %q; there are: %s", name, strings.Join(names, ", "))
	}
}

func getPools(*http.Request) (any, error) {
	list := sortedPools()
	views := make([]poolView, 0, len(list))
	for _, p := range list {
		views = append(views, viewPool(p, time.Now()))
	}
	return views, nil
}

func getPool(_ *http.Request, p *pool.Pool) (any, error) { return viewPool(p, time.Now()), nil }

func getWorkers(_ *http.Request, p *pool.Pool) (any, error) {
	return viewsOf(p), nil
}

// ofWorker calls f, if there is one, with the worker that the path names, and answers with its view.
func ofWorker(f func(*http.Request, *pool.Pool, *worker.Worker) error) answerer {
	return ofPool(func(r *http.Request, p *pool.Pool) (any, error) {
		w, err := workerOf(p, r.PathValue("worker"))
		if err == nil && f != nil {
			err = f(r, p, w)
		}
		if err != nil {
			return nil, err
		}
		return viewOf(p, w), nil
	})
}

func viewsOf(p *pool.Pool) []workerView {
	return viewWorkers(p, sortedWorkers(p), time.Now(), new(observe.Sums), nil)
}

// viewOf returns the view of a worker among its peers.
func viewOf(p *pool.Pool, w *worker.Worker) any {
	list := viewsOf(p)
	if i := slices.IndexFunc(list, func(v workerView) bool { return v.Dial == w.Dial }); i >= 0 {
		return list[i]
	}
	return viewWorker(p, w, time.Now(), proxyOf(p)) // it was just forgotten
}

// workerOf returns the worker with an address or an id.
func workerOf(p *pool.Pool, name string) (*worker.Worker, error) {
	w := p.Known(name)
	if id, err := strconv.ParseUint(name, 10, 64); err == nil && w == nil {
		w = p.ByID(id)
	}
	if w == nil {
		return nil, apiError(http.StatusNotFound, "pool %s has no worker with the address or id %q", p.Name, name)
	}
	return w, nil
}

func drain(r *http.Request, p *pool.Pool, w *worker.Worker) error {
	if p.Drain(w, true) {
		p.Logger().Info("worker is drained: it gets no new requests", zap.String("upstream", w.Dial))
	}
	if r.URL.Query().Has("move") && w.MoveStreams() {
		p.Logger().Info("streams of a drained worker move to other workers", zap.String("upstream", w.Dial))
	}
	return nil
}

func undrain(_ *http.Request, p *pool.Pool, w *worker.Worker) error {
	changed := p.Drain(w, false)
	switch _, configured := w.Drains(); {
	case configured && !changed:
		return apiError(http.StatusConflict, "the configuration drains worker %s: change it there", w.Dial)
	case changed && !configured:
		p.Logger().Info("worker is no longer drained", zap.String("upstream", w.Dial))
	}
	return nil
}

func explain(r *http.Request, p *pool.Pool) (any, error) {
	path := r.URL.Query().Get("path")
	if !strings.HasPrefix(path, "/") {
		return nil, apiError(http.StatusBadRequest,
			"path: must be the path of a request, such as /v1/chat/completions, got %q", path)
	}
	client, err := asClient(r, path)
	if err != nil {
		return nil, apiError(http.StatusBadRequest, "path: %w", err)
	}
	x := explainerOf(p)
	if x == nil {
		return nil, apiError(http.StatusServiceUnavailable, "no handler uses pool %s now", p.Name)
	}
	return x.explain(client)
}

// Interface guards
var (
	_ caddy.AdminRouter  = Admin{}
	_ caddy.AdminHandler = methods(nil)
)
