package admin

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// page shows pools in a browser. It is one file, loads nothing from elsewhere, and asks the address
// that it came from for the state once a second.
//
//go:embed page.html
var page []byte

// pagePolicy allows the page's own script and style, and nothing else.
var pagePolicy = sync.OnceValue(func() string {
	hash := func(tag string) string {
		_, text, _ := strings.Cut(string(page), "<"+tag+">")
		text, _, _ = strings.Cut(text, "</"+tag+">")
		sum := sha256.Sum256([]byte(text))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	return "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:; " +
		"script-src " + hash("script") + "; style-src " + hash("style")
})

// servePage answers with the page, with a pool's state (?state=, the slot since when), or with a past
// choice (?choice=, its number). The pool is that of ?pool=, or the first. steers: the page may drain.
func servePage(w http.ResponseWriter, r *http.Request, only string, steers bool) error {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		return apiError(http.StatusMethodNotAllowed, "method %s is not allowed: use GET", r.Method)
	}
	h, q := w.Header(), r.URL.Query()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if !q.Has("state") && !q.Has("choice") {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", pagePolicy())
		h.Set("Referrer-Policy", "same-origin") // Caddy's admin endpoint asks for it
		_, err := w.Write(page)
		return err
	}
	p, err := pagePool(r, only)
	if err != nil {
		return err
	}
	send := func(v any) error {
		h.Set("Content-Type", "application/json")
		return json.NewEncoder(w).Encode(v)
	}
	if q.Has("state") {
		v, err := stateSince(r, "state", p, steers)
		if err != nil {
			return err
		}
		if only != "" {
			v.Pools = []string{only}
		}
		return send(v)
	}
	n, err := numberIn(r, "choice")
	if err != nil {
		return err
	}
	for _, c := range p.Choices.Past(1, "", uint64(n)) { //nolint:gosec // it is not negative
		return send(viewPast(&c, true, steers, time.Now()))
	}
	return apiError(http.StatusNotFound, "the choice is forgotten")
}

// pagePool returns the pool that a request of the page names, or the first one. only, if it is not
// empty, is the only pool there is for the client.
func pagePool(r *http.Request, only string) (*pool.Pool, error) {
	name := r.URL.Query().Get("pool")
	for _, p := range sortedPools() {
		if (only == "" || p.Name == only) && (name == "" || p.Name == name) {
			return p, nil
		}
	}
	return nil, apiError(http.StatusNotFound, "there is no such pool")
}

func adminPage(w http.ResponseWriter, r *http.Request) error { return servePage(w, r, "", true) }

func init() {
	caddy.RegisterModule(Status{})
	httpcaddyfile.RegisterHandlerDirective("kv_router_status", parseStatus)
	httpcaddyfile.RegisterDirectiveOrder("kv_router_status", httpcaddyfile.After, "respond")
}

// Status is a handler that serves the page which shows pools: workers, their last minutes, the last
// choices and conditions. It only shows: it drains no worker, and has no prompts, no sessions, no ids
// of requests and no secrets. It shows the addresses of workers and the names of models, so put
// authentication before it.
type Status struct {
	// The only pool to show. Default: all.
	Pool string `json:"pool,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (Status) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router_status", New: func() caddy.Module { return new(Status) }}
}

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (s Status) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	err := servePage(w, r, s.Pool, false)
	if e, ok := err.(caddy.APIError); ok { //nolint:errorlint // as the admin endpoint does
		return caddyhttp.Error(e.HTTPStatus, e.Err)
	}
	return err
}

// parseStatus reads the directive:
//
//	kv_router_status [<matcher>] [<pool>]
func parseStatus(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	name, err := parsePool(h)
	return &Status{name}, err
}

// Interface guard
var _ caddyhttp.MiddlewareHandler = Status{}
