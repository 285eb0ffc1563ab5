package handler

import (
	"fmt"
	"net/textproto"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolSettings are those of a handler's settings that belong to its pool.
// They are compared as values.
type poolSettings struct {
	memory      int64
	blockSize   int
	textBlock   int
	ttl         time.Duration
	maxSessions int
	workers     map[string]Worker // by dial address
}

const (
	defaultTextBlock   = 64
	defaultTTL         = 5 * time.Minute
	defaultMaxSessions = 1_000_000
	minIndexMemory     = 1 << 20
	minTextBlock       = 16
	maxTextBlock       = 4096
	maxBlockSize       = 4096
	allWorkers         = "*"
)

// poolSettings returns the handler's settings of its pool, defaults filled in.
func (h *Handler) poolSettings() (*poolSettings, error) {
	s := &poolSettings{
		memory: kvscore.DefaultMemory, blockSize: kvscore.DefaultBlockSize, textBlock: defaultTextBlock,
		ttl: defaultTTL, maxSessions: defaultMaxSessions,
	}
	if ix := h.Index; ix != nil {
		s.memory = orDefault(ix.Memory, s.memory)
		s.blockSize = orDefault(ix.BlockSize, s.blockSize)
		s.textBlock = orDefault(ix.TextBlock, s.textBlock)
	}
	if a := h.Affinity; a != nil {
		s.ttl = orDefault(time.Duration(a.TTL), s.ttl)
		s.maxSessions = orDefault(a.MaxSessions, s.maxSessions)
	}
	switch {
	case s.memory < minIndexMemory:
		return nil, fmt.Errorf("index memory: must be at least %d bytes, got %d", minIndexMemory, s.memory)
	case s.blockSize < 1 || s.blockSize > maxBlockSize:
		return nil, fmt.Errorf("index block_size: must be between 1 and %d tokens, got %d", maxBlockSize, s.blockSize)
	case s.textBlock < minTextBlock || s.textBlock > maxTextBlock:
		return nil, fmt.Errorf("index text_block: must be between %d and %d bytes, got %d", minTextBlock, maxTextBlock, s.textBlock)
	case s.ttl < time.Second:
		return nil, fmt.Errorf("affinity ttl: must be at least 1s, got %s", s.ttl)
	case s.maxSessions < 1:
		return nil, fmt.Errorf("affinity max_sessions: must be at least 1, got %d", s.maxSessions)
	}
	return s, h.workerSettings(s)
}

func orDefault[T int | int64 | time.Duration](v, def T) T {
	if v == 0 {
		return def
	}
	return v
}

// workerSettings checks the workers and merges the defaults of `*` into each.
func (h *Handler) workerSettings(s *poolSettings) error {
	s.workers = make(map[string]Worker, len(h.Workers))
	upstreams := make(map[string]bool, len(h.ReverseProxy.Upstreams))
	for _, up := range h.ReverseProxy.Upstreams {
		upstreams[up.Dial] = true
	}
	byID := make(map[uint64]string)
	for _, w := range h.Workers {
		if w == nil || w.Dial == "" {
			return fmt.Errorf("worker: the dial address is missing")
		}
		if _, twice := s.workers[w.Dial]; twice {
			return fmt.Errorf("worker %s: configured twice", w.Dial)
		}
		if w.KVTokens < 0 {
			return fmt.Errorf("worker %s: kv_tokens must not be negative, got %d", w.Dial, w.KVTokens)
		}
		if w.Dial == allWorkers && w.ID != 0 {
			return fmt.Errorf("worker *: id %d cannot be that of all workers", w.ID)
		}
		if w.Dial != allWorkers && !upstreams[w.Dial] && h.ReverseProxy.DynamicUpstreamsRaw == nil {
			return fmt.Errorf("worker %s: is not among the upstreams", w.Dial)
		}
		s.workers[w.Dial] = *w
	}
	for dial := range upstreams {
		id := s.worker(dial).ID
		if other, taken := byID[id]; taken {
			return fmt.Errorf("worker %s: id %d is that of worker %s, too", dial, id, other)
		}
		byID[id] = dial
	}
	return nil
}

// worker returns the settings of the worker with the address, with an id.
func (s *poolSettings) worker(dial string) Worker {
	all := s.workers[allWorkers]
	w := s.workers[dial]
	w.Dial = dial
	if w.KVTokens == 0 {
		w.KVTokens = all.KVTokens
	}
	if w.ID == 0 {
		w.ID = derivedID(dial)
	}
	return w
}

func (s *poolSettings) equal(o *poolSettings) bool {
	if s.memory != o.memory || s.blockSize != o.blockSize || s.textBlock != o.textBlock ||
		s.ttl != o.ttl || s.maxSessions != o.maxSessions {
		return false
	}
	for dial, w := range s.workers {
		if other, both := o.workers[dial]; both && other != w {
			return false
		}
	}
	return true
}

// sessionKey is one place where a session's key is looked for: a header, or
// the body's nvext where the header is empty.
type sessionKey struct{ header string }

func (h *Handler) sessionKeys() ([]sessionKey, error) {
	names := []string{"nvext", "header:X-Session-Id"}
	if h.Affinity != nil && len(h.Affinity.Key) > 0 {
		names = h.Affinity.Key
	}
	keys := make([]sessionKey, 0, len(names))
	for _, name := range names {
		if name == "nvext" {
			keys = append(keys, sessionKey{})
			continue
		}
		header, ok := strings.CutPrefix(name, "header:")
		if !ok || header == "" {
			return nil, fmt.Errorf("affinity key: must be nvext or header:<name>, got %q", name)
		}
		if strings.ContainsAny(header, "_.") {
			h.logger.Warn("Caddy drops request headers with such a name unless the server's expected_underscore_headers lists it: " + header)
		}
		keys = append(keys, sessionKey{header: textproto.CanonicalMIMEHeaderKey(header)})
	}
	return keys, nil
}
