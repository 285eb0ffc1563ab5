package handler

import (
	"fmt"
	"net/textproto"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// poolSettings returns what the configuration says of the pool.
func (h *Handler) poolSettings() (*poolSettings, error) {
	dynamic := h.ReverseProxy.DynamicUpstreamsRaw != nil
	s := &poolSettings{
		engine: h.Engine, others: dynamic,
		workers:   make(map[string]workerSettings, len(h.Workers)),
		upstreams: make(map[string]bool, len(h.ReverseProxy.Upstreams)),
	}
	if ix := h.Index; ix != nil {
		s.memory, s.blockSize, s.textBlock = ix.Memory, ix.BlockSize, ix.TextBlock
	}
	if a := h.Affinity; a != nil {
		s.ttl, s.maxSessions = time.Duration(a.TTL), a.MaxSessions
	}
	if q := h.Queue; q != nil {
		s.maxWaiting, s.maxWait = q.MaxWaiting, time.Duration(q.MaxWait)
	}
	if b := h.RetryBudget; b != nil {
		s.retries = retryBudget{true, b.Percent, b.PerSecond}
	}
	for _, up := range h.ReverseProxy.Upstreams {
		s.upstreams[up.Dial] = true
		s.others = s.others || strings.Contains(up.Dial, "{")
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	for _, w := range h.Workers {
		if err := s.add(w, dynamic); err != nil {
			return nil, err
		}
	}
	return s, s.checkIDs()
}

// sessionKey is one place where a session's key is looked for: a header, a
// member of the body, or its nvext where both are empty.
type sessionKey struct {
	header string
	body   func(*api.Request) string
}

// bodyKeys are the members of a body that may hold a session's key.
var bodyKeys = map[string]func(*api.Request) string{
	"prompt_cache_key": func(r *api.Request) string { return r.CacheKey },
	"session_id":       func(r *api.Request) string { return r.SessionID },
	"metadata.user_id": func(r *api.Request) string { return r.UserID },
}

func (h *Handler) sessionKeys() ([]sessionKey, error) {
	names := []string{"nvext", "header:X-Session-Id"}
	if h.Affinity != nil && len(h.Affinity.Key) > 0 {
		names = h.Affinity.Key
	}
	keys := make([]sessionKey, 0, len(names))
	for _, name := range names {
		kind, rest, _ := strings.Cut(name, ":")
		switch {
		case name == "nvext":
			keys = append(keys, sessionKey{})
		case kind == "header" && rest != "":
			if strings.ContainsAny(rest, "_.") {
				h.logger.Warn("Caddy drops request headers with such a name unless the server's expected_underscore_headers lists it: " + rest)
			}
			keys = append(keys, sessionKey{header: textproto.CanonicalMIMEHeaderKey(rest)})
		case kind == "body" && bodyKeys[rest] != nil:
			keys = append(keys, sessionKey{body: bodyKeys[rest]})
		default:
			return nil, fmt.Errorf("affinity key: must be nvext, header:<name>, body:prompt_cache_key, body:session_id or body:metadata.user_id, got %q", name)
		}
	}
	return keys, nil
}
