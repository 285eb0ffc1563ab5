package handler

import (
	"fmt"
	"net/textproto"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
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
