package handler

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// liveCheck is how often a provisioned configuration checks whether it serves.
const liveCheck = 20 * time.Millisecond

// adoptWhenLive adopts the pool once the configuration serves, without waiting for
// its first request: a configuration that is only validated, or is rejected, asks
// no worker and changes nothing. Caddy has no hook for that: apps are started, and
// the event "started" is emitted, when the configuration may yet be rejected. Each
// configuration has a metrics registry of its own, which identifies it.
func (h *Handler) adoptWhenLive(ctx context.Context, registry *prometheus.Registry) {
	ticker := time.NewTicker(liveCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if active := caddy.ActiveContext(); active.GetMetricsRegistry() == registry {
			h.adopt()
			return
		}
	}
}

// adopt has the pool use this handler's settings, once: when the configuration serves,
// or with the first request if that comes sooner.
func (h *Handler) adopt() {
	if !h.adopted.Load() && h.adopted.CompareAndSwap(false, true) {
		if h.pool.Apply(h.config.Get()) {
			h.logger.Info("pool settings changed", zap.String("pool", h.Pool))
		}
		h.pool.ServingSince.Store(time.Now().Unix())
		h.explainer.Lead()
		h.prober.Start()
	}
}
