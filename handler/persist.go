package handler

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/snapshot"
	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
)

// Persist has the router keep what it knows in Caddy's storage: sessions, the cache models,
// and what it has learned of the engines. All handlers of a pool must agree on it.
type Persist struct {
	// The time between two snapshots, at least 1s. A snapshot is also written when Caddy
	// stops. Default: 30s.
	Interval caddy.Duration `json:"interval,omitempty"`

	// A name of this router that is its own among all that use the storage, and stays the
	// same over restarts. Global placeholders such as `{env.HOSTNAME}` are allowed.
	// Default: the id that Caddy keeps in its data directory.
	Router string `json:"router,omitempty"`
}

// set puts the options into the settings of a pool.
func (p *Persist) set(s *pool.Settings) {
	if p == nil {
		return
	}
	s.Persist = cmp.Or(time.Duration(p.Interval), pool.DefaultPersist)
	s.Router = caddy.NewReplacer().ReplaceAll(p.Router, "")
}

// storage is Caddy's storage. It does not load large values: snapshots have none.
type storage struct{ certmagic.Storage }

// Load implements snapshot.Storage.
func (s storage) Load(ctx context.Context, key string) ([]byte, error) {
	if info, err := s.Stat(ctx, key); err == nil && info.Size > snapshot.MaxValue {
		return nil, fmt.Errorf("%w: %d bytes", snapshot.ErrCorrupt, info.Size)
	}
	return s.Storage.Load(ctx, key)
}

// recallPool has a new pool take over the secret of its last snapshot. It writes nothing,
// because Caddy may reject the configuration.
func (h *Handler) recallPool(ctx caddy.Context) error {
	if h.settings.Persist == 0 {
		return nil
	}
	h.storage = storage{ctx.Storage()}
	if h.settings.Router == "" {
		if _, err := os.Stat(filepath.Join(caddy.AppDataDir(), "instance.uuid")); err != nil {
			return h.flushAtStop(ctx) // Caddy makes one, and so there is no snapshot yet
		}
	}
	if at := h.snapshotPlace(h.settings.Router); at != nil {
		h.pool.Recall(at)
	}
	return h.flushAtStop(ctx)
}

// snapshotPlace returns the place of the pool's snapshots. The router's name is by default the id
// that Caddy keeps in its data directory. Without one, it returns nil.
func (h *Handler) snapshotPlace(router string) *snapshot.Place {
	if router == "" {
		id, err := caddy.InstanceID()
		if err != nil {
			h.logger.Warn("snapshots are off, because Caddy has no id for this router: set affinity persist router", zap.Error(err))
			return nil
		}
		router = id.String()
	}
	return snapshot.At(h.storage, router, h.Pool)
}

// persist begins or ends the snapshots of the pool, as the configuration says. The
// configuration serves.
func (h *Handler) persist() {
	set := h.config.Get()
	if set.Persist == 0 {
		h.pool.Persist(nil)
		return
	}
	if h.storage == nil {
		return // another handler of the pool has it
	}
	if at := h.snapshotPlace(set.Router); at != nil {
		h.pool.Persist(at)
	}
}

// flushAtStop has the pool write a snapshot when Caddy begins to stop. Later, the storage may
// be closed before the pool is.
func (h *Handler) flushAtStop(ctx caddy.Context) error {
	app, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("loading events: %w", err)
	}
	if err = app.(*caddyevents.App).On("stopping", stopping{h}); err != nil {
		return fmt.Errorf("subscribing to events: %w", err)
	}
	return nil
}

// stopping is the handler of Caddy's event of that name.
type stopping struct{ h *Handler }

// Handle implements caddyevents.Handler. During a reload, another configuration serves by now.
func (s stopping) Handle(context.Context, caddy.Event) error {
	if active := caddy.ActiveContext(); active.GetMetricsRegistry() == nil {
		s.h.pool.FlushOnce()
	}
	return nil
}

// Interface guards
var (
	_ snapshot.Storage    = storage{}
	_ caddyevents.Handler = stopping{}
)
