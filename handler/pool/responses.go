package pool

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// maxResponses is how many responses the pool remembers at least, in about 6 MiB.
const maxResponses = 1 << 16

// responses remembers which target keeps which response of the responses API, and to which
// session it belongs. A request that names a response must go to its target. When maxResponses
// are young, these become old, and the old ones go.
type responses struct {
	seed    atomic.Uint64 // of the ids' hashes: nobody outside can choose collisions
	journal *journal.Journal

	mu         sync.Mutex
	young, old map[uint64]keptResponse // by the hash of the id
}

// keptResponse is what the pool remembers of a response.
type keptResponse struct {
	hash    uint64
	target  kvscore.Target
	session affinity.Identity
}

// Keep records the target that keeps a response, and its session.
func (r *responses) Keep(id string, t kvscore.Target, session affinity.Identity) {
	one := keptResponse{xxh3.HashStringSeed(id, r.seed.Load()), t, session}
	r.journal.ResponseKept(journal.Response{Hash: one.hash, Session: session}, t)
	r.follow(one)
}

// dump returns all responses, the old ones first.
func (r *responses) dump() []keptResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.AppendSeq(slices.Collect(maps.Values(r.old)), maps.Values(r.young))
}

// Session returns the session of a response, which does not count as named.
func (r *responses) Session(id string) (session affinity.Identity, ok bool) {
	_, session, ok = r.Find(id, false)
	return session, ok
}

// Keeps returns whether a target is known to keep something of that id.
func (r *responses) Keeps(id string) bool {
	_, _, ok := r.Find(id, false)
	return ok
}

// follow makes a response the newest. Another router may have sent it.
func (r *responses) follow(one keptResponse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renew(one)
}

// renew makes a response young. The caller holds the lock.
func (r *responses) renew(one keptResponse) {
	if r.young == nil || len(r.young) >= maxResponses {
		r.young, r.old = make(map[uint64]keptResponse), r.young
	}
	r.young[one.hash] = one
	delete(r.old, one.hash)
}

// Find returns the target that keeps a response, and the response's session. If use is set, the
// response counts as named.
func (r *responses) Find(id string, use bool) (t kvscore.Target, session affinity.Identity, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hash := xxh3.HashStringSeed(id, r.seed.Load())
	kept, ok := r.young[hash]
	if !ok {
		if kept, ok = r.old[hash]; ok && use {
			r.renew(kept)
		}
	}
	return kept.target, kept.session, ok
}

// Count returns how many responses are remembered.
func (r *responses) Count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.young) + len(r.old)
}

// Aborts are the ids of requests that clients have aborted lately by a request of its own. What then
// breaks is no fault, and does not go on elsewhere.
type Aborts struct {
	mu  sync.Mutex
	ids map[string]time.Time // when
	all time.Time            // when all were
}

const (
	maxAborts  = 4096
	maxAborted = 256 // bytes of an id
	// abortLasts is how long after an abort its request may end.
	abortLasts = time.Minute
)

// Note records an abort. The empty id means all requests.
func (a *Aborts) Note(t time.Time, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case id == "":
		a.all = t
	case len(id) <= maxAborted:
		if a.ids == nil || len(a.ids) >= maxAborts {
			a.ids = make(map[string]time.Time)
		}
		a.ids[id] = t
	}
}

// Has returns whether a request that began at a time was aborted. SGLang aborts all whose ids begin
// with the one that is named.
func (a *Aborts) Has(t, begun time.Time, id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	lately := func(at time.Time) bool { return at.After(begun) && t.Sub(at) < abortLasts }
	if lately(a.all) {
		return true
	}
	for aborted, at := range a.ids {
		if strings.HasPrefix(id, aborted) && lately(at) {
			return true
		}
	}
	return false
}
