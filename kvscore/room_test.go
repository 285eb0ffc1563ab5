package kvscore

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestSurplusThatIsCached has a tenant with many requests beside a light one. A long prompt that is cached but for
// little needs only the room of a short one.
func TestSurplusThatIsCached(t *testing.T) {
	s := NewScheduler(Settings{Bounded: true})
	at := []Target{{Worker: 1}}
	s.Declare(at[0], 1<<20)
	blocks := make([]uint64, 500)
	for i := range blocks {
		blocks[i] = uint64(i + 1) //nolint:gosec // small
	}
	book := func(needs Room, p cache.Prompt) *Lease {
		_, l := s.selectOf(time.Now(), &Request{Prompt: p, Streamed: true}, at, 0, nil, &Selection{Needs: needs})
		return l
	}
	long := cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: 8000}
	book(NoRoom, long).End(true, nil)
	book(NoRoom, cache.Prompt{Tokens: 100}) // a prefill of another tenant
	if book(Clear, cache.Prompt{Tokens: 8000}) != nil {
		t.Error("a long prompt of a surplus begins beside another")
	}
	if book(Clear, long) == nil {
		t.Error("a prompt that is cached does not")
	}
}
