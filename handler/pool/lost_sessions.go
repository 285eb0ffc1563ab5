package pool

import (
	"context"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/affinity"
)

// maxLost is how many lost sessions the pool remembers at least, and half of how many it
// remembers at most.
const maxLost = 1 << 15

// lostSessions are the sessions that engines held for the router and have lost. The next turn
// of one must not be sent without the turns before it.
type lostSessions struct {
	mu   sync.Mutex
	keys generations[affinity.Key, struct{}]
}

// lose remembers that the session of a key is lost.
func (p *Pool) lose(key affinity.Key) {
	l := &p.lostSessions
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keys.put(key, struct{}{}, maxLost)
}

// Lost returns whether an engine held the session of a key, which is lost.
func (p *Pool) Lost(ctx context.Context, key affinity.Key) bool {
	p.Sessions.Reported(ctx) // it may have expired just now
	l := &p.lostSessions
	l.mu.Lock()
	defer l.mu.Unlock()
	_, known, _ := l.keys.get(key)
	return known
}

// ForgetLost forgets that the session of a key was lost, because a client binds it again.
func (p *Pool) ForgetLost(key affinity.Key) {
	l := &p.lostSessions
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keys.remove(key)
}
