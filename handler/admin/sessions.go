package admin

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

type sessionPage struct {
	Total    int           `json:"total_sessions"`
	Sessions []sessionView `json:"sessions"`
	Next     string        `json:"next_after,omitempty"`
}

func getSessions(r *http.Request, p *pool.Pool) (any, error) {
	var after affinity.Key
	if s := r.URL.Query().Get("after"); s != "" {
		var ok bool
		if after, ok = affinity.ParseKey(s); !ok {
			return nil, apiError(http.StatusBadRequest,
				"after: must be the hash of a session, %d hexadecimal digits, got %q", 2*len(after), s)
		}
	}
	limit := defaultPage
	if s := r.URL.Query().Get("limit"); s != "" {
		var err error
		if limit, err = strconv.Atoi(s); err != nil || limit < 1 || limit > maxPage {
			return nil, apiError(http.StatusBadRequest, "limit: must be a whole number from 1 to %d, got %q", maxPage, s)
		}
	}
	list := p.Sessions.List(after, limit+1)
	page := sessionPage{Total: p.Sessions.Len()}
	if len(list) > limit {
		list = list[:limit]
		page.Next = list[limit-1].Key.String()
	}
	t, dials := time.Now(), dials(p)
	page.Sessions = make([]sessionView, 0, len(list))
	for _, e := range list {
		page.Sessions = append(page.Sessions, viewSession(e.Key, &e.Binding, dials, t))
	}
	return page, nil
}

func sessionNamed(r *http.Request, p *pool.Pool) (affinity.Entry, error) {
	name, q := r.PathValue("key"), r.URL.Query()
	var key affinity.Key
	if q.Has("hashed") {
		var ok bool
		if key, ok = affinity.ParseKey(name); !ok {
			return affinity.Entry{}, apiError(http.StatusBadRequest, "the hash of a session has %d hexadecimal digits", 2*len(key))
		}
	} else {
		of := affinity.Tenant{q.Get("scope"), q.Get("tenant")}
		key = p.Secret().Session(p.Secret().Identity(strings.TrimSpace(name)), of, p.Canonical(q.Get("model")))
	}
	b, ok := p.Sessions.Peek(key)
	if !ok {
		return affinity.Entry{}, errNoSession(p)
	}
	return affinity.Entry{Key: key, Binding: b}, nil
}

func errNoSession(p *pool.Pool) error {
	return apiError(http.StatusNotFound, "pool %s has no such session of this model, tenant and scope: name them as well", p.Name)
}

// ofSession calls f, if there is one, with the session that the path names, and answers with its view.
func ofSession(f func(*http.Request, *pool.Pool, *affinity.Entry) error) answerer {
	return ofPool(func(r *http.Request, p *pool.Pool) (any, error) {
		e, err := sessionNamed(r, p)
		if err == nil && f != nil {
			err = f(r, p, &e)
		}
		if err != nil {
			return nil, err
		}
		return viewSession(e.Key, &e.Binding, dials(p), time.Now()), nil
	})
}

func unbind(_ *http.Request, p *pool.Pool, e *affinity.Entry) error {
	for e.Version != 0 {
		now, ended := turn.Unbind(p, e.Key, e.Version)
		if ended {
			return nil
		}
		e.Binding = now // it was bound anew meanwhile
	}
	return errNoSession(p)
}

func rebind(r *http.Request, p *pool.Pool, e *affinity.Entry) (err error) {
	if e.Kind == affinity.EngineBacked {
		return apiError(http.StatusConflict, "the engine holds the session, which cannot move: delete it")
	}
	want := e.Want
	want.Kind = affinity.Fixed
	if want.Target, err = targetIn(r, p); err != nil {
		return err
	}
	b, ok, err := p.Sessions.Bind(e.Key, e.Version, want)
	switch {
	case err != nil:
		return apiError(http.StatusServiceUnavailable, "binding the session: %w", err)
	case !ok:
		return apiError(http.StatusConflict, "the session was bound anew meanwhile: try again")
	}
	e.Binding = b
	return nil
}

func targetIn(r *http.Request, p *pool.Pool) (kvscore.Target, error) {
	q := r.URL.Query()
	w, err := workerOf(p, q.Get("worker"))
	if err != nil {
		return kvscore.Target{}, apiError(http.StatusBadRequest,
			"worker: must be the address or the id of a worker, got %q", q.Get("worker"))
	}
	rank := uint64(0)
	if s := q.Get("rank"); s != "" {
		if rank, err = strconv.ParseUint(s, 10, 32); err != nil || rank >= uint64(w.Ranks()) {
			return kvscore.Target{}, apiError(http.StatusBadRequest, "rank: must be from 0 to %d, got %q", w.Ranks()-1, s)
		}
	}
	return kvscore.Target{Worker: w.ID, Rank: uint32(rank)}, nil
}
