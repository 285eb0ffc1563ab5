package handler

import (
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// A response of the responses API is kept by the engine that made it, in its
// memory: what names it must go there. Which engine that is, is remembered in
// the store of the sessions.

// responseTTL is how long it is remembered at least, since the response was
// made or last named.
const responseTTL = time.Hour

// responseNamed returns the id of the response that a request names in its
// path, to get, cancel or delete it, empty if it names none.
func responseNamed(r *http.Request) string {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete:
	default:
		return ""
	}
	before, rest, ok := strings.Cut(r.URL.Path, "/responses/")
	if !ok || api.For(before+"/responses") == nil {
		return ""
	}
	id, _, _ := strings.Cut(rest, "/")
	return id
}

// returnTo makes the worker that keeps the named response the only one, and
// tells whether it is known and still an upstream. A rank that it does not have
// any more is left open.
func (rt *route) returnTo(ups reverseproxy.UpstreamPool) bool {
	look := rt.pool.sessions.Get
	if rt.dry {
		look = rt.pool.sessions.Peek
	}
	b, ok := look(responseKey(rt.plan.response))
	if !ok {
		return false
	}
	w := rt.named(ups, b.Target.Worker)
	if w == nil {
		return false // it is gone, and what it kept
	}
	rank := nvext.Some(b.Target.Rank)
	rank.Set = int64(b.Target.Rank) < int64(w.ranks())
	rt.only = only{w, rank, reasonResponse}
	return true
}

// keep remembers who keeps the response that an answer is, as soon as its id is
// there: clients may name it while it is still being made.
func (o *observer) keep() {
	req := o.rt.plan.request
	if o.kept || req == nil || req.Unstored {
		return
	}
	id := o.reader.ResponseID()
	if id == "" {
		return
	}
	o.kept = true
	ttl := max(responseTTL, o.rt.pool.settings.Load().ttl)
	if _, err := o.rt.pool.sessions.Put(responseKey(id), o.attempt.lease.Target(), ttl, affinity.RouterOnly); err != nil {
		o.rt.fallBack(fallbackUnbound)
	}
}
