package handler

import (
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// poolSettings returns what the configuration says of the pool.
func (h *Handler) poolSettings() (*pool.Settings, error) {
	dynamic := h.ReverseProxy.DynamicUpstreamsRaw != nil
	s := &pool.Settings{
		Engine: h.Engine, Others: dynamic,
		Workers:   make(map[string]pool.WorkerSettings, len(h.Workers)),
		Upstreams: make(map[string]bool, len(h.ReverseProxy.Upstreams)),
	}
	if ix := h.Index; ix != nil {
		s.Memory, s.BlockSize, s.TextBlock = ix.Memory, ix.BlockSize, ix.TextBlock
	}
	if a := h.Affinity; a != nil {
		s.TTL, s.MaxSessions = time.Duration(a.TTL), a.MaxSessions
	}
	if q := h.Queue; q != nil {
		s.MaxWaiting, s.MaxWait = q.MaxWaiting, time.Duration(q.MaxWait)
	}
	if b := h.RetryBudget; b != nil {
		s.Retries = pool.RetryBudget{Set: true, Percent: b.Percent, Rate: b.PerSecond}
	}
	for _, up := range h.ReverseProxy.Upstreams {
		s.Upstreams[up.Dial] = true
		s.Others = s.Others || strings.Contains(up.Dial, "{")
	}
	if err := s.Check(); err != nil {
		return nil, err
	}
	for _, w := range h.Workers {
		if err := s.Add(w, dynamic); err != nil {
			return nil, err
		}
	}
	return s, s.CheckIDs()
}
