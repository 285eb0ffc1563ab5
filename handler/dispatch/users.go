package dispatch

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	maxUsers   = 1024 // that have series of their own
	otherUsers = "other"
)

// users counts what each user does. A user is a client whom Caddy has authenticated.
type users struct {
	requests, tokens *prometheus.CounterVec

	mu    sync.Mutex
	names map[string]bool
}

// label returns the value of the label user. Names that come after the first maxUsers share one.
func (u *users) label(name string) string {
	name = strings.ToValidUTF8(name, "�") // as label values must be
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.names[name] {
		return name
	}
	if len(u.names) >= maxUsers {
		return otherUsers
	}
	u.names[name] = true
	return name
}

// CountUser counts a request of a pool that has ended. An empty name is no user.
func (m *Metrics) CountUser(pool, name string, r *Report) {
	if name == "" {
		return
	}
	name = m.users.label(name)
	m.users.requests.WithLabelValues(pool, name, r.Outcome).Inc()
	m.users.add(pool, name, "prompt", r.Prompt)
	m.users.add(pool, name, "cached", r.Cached)
	m.users.add(pool, name, "output", r.Completion)
}

func (u *users) add(pool, name, kind string, tokens int64) {
	if tokens > 0 { // -1 is unknown
		u.tokens.WithLabelValues(pool, name, kind).Add(float64(tokens))
	}
}
