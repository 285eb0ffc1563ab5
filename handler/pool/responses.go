package pool

import (
	"sync"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// maxResponses is how many responses the pool remembers at least. It remembers at most
// twice as many, in a few MiB.
const maxResponses = 1 << 16

// responses remembers which target keeps which response of the responses API. A request
// that names a response must go to its target. At the bound, the responses that no request
// has named for longest go first.
type responses struct {
	seed uint64 // of the ids' hashes: nobody outside can choose collisions

	mu       sync.Mutex
	new, old map[uint64]kvscore.Target // by the hash of the id; old is dropped when new is full
}

// Keep records the target that keeps a response.
func (r *responses) Keep(id string, t kvscore.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(xxh3.HashStringSeed(id, r.seed), t)
}

// add makes an entry the newest. The caller holds the lock.
func (r *responses) add(key uint64, t kvscore.Target) {
	if r.new == nil || len(r.new) >= maxResponses {
		r.new, r.old = make(map[uint64]kvscore.Target), r.new
	}
	r.new[key] = t
	delete(r.old, key)
}

// Find returns the target that keeps a response. If use is set, the response counts
// as named.
func (r *responses) Find(id string, use bool) (t kvscore.Target, ok bool) {
	key := xxh3.HashStringSeed(id, r.seed)
	r.mu.Lock()
	defer r.mu.Unlock()
	if t, ok = r.new[key]; ok {
		return t, true
	}
	if t, ok = r.old[key]; ok && use {
		r.add(key, t)
	}
	return t, ok
}

// Count returns how many responses are remembered.
func (r *responses) Count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.new) + len(r.old)
}
