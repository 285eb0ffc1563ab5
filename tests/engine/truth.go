package engine

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// Publishers returns those of the present life, by rank, for tests that lose or delay events. There
// are none while the engine is killed, or if it publishes no events.
func (e *Engine) Publishers() []*publisher.Publisher {
	l := e.enter()
	if l == nil {
		return nil
	}
	defer l.handlers.Done()
	return l.publishers
}

// Quiet returns whether all KV events of what has changed were sent.
func (e *Engine) Quiet() bool {
	l := e.enter()
	if l == nil {
		return false
	}
	defer l.handlers.Done()
	return !slices.ContainsFunc(l.ranks, func(k *rank) bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return len(k.changes.events) > 0 || k.changes.pub.Unsent() > 0
	})
}

// Cached returns how many tokens of a prompt the first rank would take up now. The engine must live.
func (e *Engine) Cached(tokens []uint32) int {
	l := e.enter()
	defer l.handlers.Done()
	k := l.ranks[0]
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cache.Hit(cache.NewPrompt(cache.Root{Model: e.cfg.Model}, tokens, e.cfg.BlockSize))
}
