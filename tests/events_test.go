package tests

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(heard)) }

// heard is a handler of events that remembers them.
type heard struct{}

var hears struct {
	sync.Mutex
	events map[string]bool
}

// CaddyModule implements caddy.Module.
func (heard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.heard", New: func() caddy.Module { return new(heard) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (heard) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() { //nolint:revive // it has no arguments
	}
	return nil
}

// Handle implements caddyevents.Handler.
func (heard) Handle(ctx context.Context, e caddy.Event) error {
	repl, _ := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	hears.Lock()
	defer hears.Unlock()
	if hears.events == nil {
		hears.events = make(map[string]bool)
	}
	hears.events[fmt.Sprint(e.Name(), " ", repl.ReplaceAll("{event.data.upstream}{event.data.condition}", ""))] = true
	return nil
}

// TestEvents has workers fail, come back and be drained, also after a reload, and a condition begin.
func TestEvents(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	of := engines[0].Addr()
	s := startCaddy(t, route(engines), "events {\non * heard\n}")
	told := func(what string) {
		t.Helper()
		eventually(t, what, func() bool {
			hears.Lock()
			defer hears.Unlock()
			return hears.events[what]
		})
	}
	s.mustChat(t, ask("hello"))
	engines[0].Kill()
	for range 2 { // the first one finds it dead
		if a := s.chat(t.Context(), ask("hello")); a.ok() {
			t.Error("a dead engine has answered")
		}
	}
	told("kv_router_worker_marked_down " + of)
	told("kv_router_condition_begins all workers are marked down, and the router uses them anyway")
	revive(t, engines[0])
	told("kv_router_worker_healthy " + of)
	s.mustReload(t, route(engines)) // the pool goes on, with another events app
	kvRouter(t, "drain", of, "--address", s.admin)
	told("kv_router_worker_drained " + of)
}
