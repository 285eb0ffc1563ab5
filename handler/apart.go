package handler

import (
	"fmt"
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// saltEnforce is the one value of Handler.CacheSalt.
const saltEnforce = "enforce"

// salt returns what keeps the request's cache and sessions apart, in the router
// and in engines; empty if nothing does.
func (p *plan) salt() string {
	if read := p.read(); read != nil {
		return p.ext.Salt(read.Salt)
	}
	return p.ext.Salt("")
}

// mustKeepApart tells whether the operator insists on it that a request's cache
// is kept apart.
func (h *Handler) mustKeepApart(r *http.Request, p *plan) bool {
	return h.CacheSalt == saltEnforce && p.salt() != "" && leavesCache(r, p)
}

// leavesCache tells whether a request leaves something in a cache: what computes
// nothing of a prompt does not.
func leavesCache(r *http.Request, p *plan) bool {
	return p.api != nil && p.api.Work() != api.Count || p.api == nil && infersUnplanned(r)
}

// saltIsText refuses a salt that is no text, where salts are to be heeded and no
// tenant's stands for it: no engine is known to make one of it.
func (h *Handler) saltIsText(r *http.Request, p *plan) error {
	read := p.read()
	if h.CacheSalt != saltEnforce || read == nil || read.OddSalt == "" || p.ext.Salt("") != "" || !leavesCache(r, p) {
		return nil
	}
	return &api.Refusal{API: orUnplanned(p.api), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"cache_salt: must be a string, got %s", read.OddSalt)}
}

// keepsApart returns whether the worker's engine isolates the request's cache, if that
// is needed.
func (rt *route) keepsApart(w *worker) bool {
	want := rt.wants()
	return rt.pool.isolates(&want, w)
}

// errShared returns the error of a request whose cache no worker is known to keep
// apart, nil if some worker is.
func (rt *route) errShared(ups reverseproxy.UpstreamPool) error {
	if !rt.apart || len(ups) == 0 || slices.ContainsFunc(rt.table(ups).rows, func(row tableRow) bool { return rt.keepsApart(row.worker) }) {
		return nil
	}
	return rt.shared("that of any worker")
}

// shared returns the error of a request that would share a cache.
func (rt *route) shared(format string, args ...any) error {
	where := "this path"
	if a := rt.plan.api; a != nil {
		where = "the API " + a.Name()
	}
	return &api.Refusal{API: orUnplanned(rt.plan.api), Status: http.StatusBadRequest, Code: api.CodeShared, Param: "cache_salt", Err: fmt.Errorf(
		"the request has a salt (cache_salt, or X-Tenant-Id), and no engine is known to keep its cache apart in %s: not %s", where, fmt.Sprintf(format, args...))}
}
