package pool

import (
	"slices"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// maxResponses is how many responses the pool remembers at least. It remembers at most
// twice as many, in about 10 MiB.
const maxResponses = 1 << 16

// responses remembers which target keeps which response of the responses API, and to which
// session it belongs. A request that names a response must go to its target. At the bound,
// the responses that no request has named for longest go first.
type responses struct {
	seed uint64 // of the ids' hashes: nobody outside can choose collisions

	mu    sync.Mutex
	kept  generations[uint64, keptResponse] // by the hash of the id
	order [2][]uint64                       // the keys of the older and the newer half in their order
}

// keptResponse is what the pool remembers of a response.
type keptResponse struct {
	target  kvscore.Target
	session affinity.Identity
}

// Keep records the target that keeps a response, and its session.
func (r *responses) Keep(id string, t kvscore.Target, session affinity.Identity) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(xxh3.HashStringSeed(id, r.seed), keptResponse{t, session})
}

// add makes an entry the newest. The caller holds the lock.
func (r *responses) add(key uint64, kept keptResponse) {
	_, known, aging := r.kept.get(key)
	turned := r.kept.put(key, kept, maxResponses)
	if turned {
		r.order = [2][]uint64{r.order[1], nil}
	}
	if !known || aging || turned {
		r.order[1] = append(r.order[1], key)
	}
}

// dump passes all responses to each, the oldest first. It holds the lock for a thousand at a
// time. Those that are named meanwhile may come twice.
func (r *responses) dump(each func(hash uint64, kept keptResponse)) {
	r.mu.Lock()
	order := r.order
	r.mu.Unlock()
	for _, keys := range order {
		for keys := range slices.Chunk(keys, 1024) {
			for _, one := range r.several(keys) {
				each(one.hash, one.keptResponse)
			}
		}
	}
}

type hashedResponse struct {
	hash uint64
	keptResponse
}

// several returns the responses with the keys that are still known.
func (r *responses) several(keys []uint64) []hashedResponse {
	list := make([]hashedResponse, 0, len(keys))
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range keys {
		if kept, ok, _ := r.kept.get(key); ok {
			list = append(list, hashedResponse{key, kept})
		}
	}
	return list
}

// restore adds a response of an earlier run, and returns whether it was not known.
func (r *responses) restore(hash uint64, kept keptResponse) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known, _ := r.kept.get(hash); known {
		return false
	}
	r.add(hash, kept)
	return true
}

// Find returns the target that keeps a response. If use is set, the response counts
// as named.
func (r *responses) Find(id string, use bool) (t kvscore.Target, ok bool) {
	kept, ok := r.find(id, use)
	return kept.target, ok
}

// Session returns the session of a response. The response does not count as named.
func (r *responses) Session(id string) (session affinity.Identity, ok bool) {
	kept, ok := r.find(id, false)
	return kept.session, ok
}

func (r *responses) find(id string, use bool) (kept keptResponse, ok bool) {
	key := xxh3.HashStringSeed(id, r.seed)
	r.mu.Lock()
	defer r.mu.Unlock()
	kept, ok, aging := r.kept.get(key)
	if aging && use {
		r.add(key, kept)
	}
	return kept, ok
}

// Count returns how many responses are remembered.
func (r *responses) Count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kept.count()
}
