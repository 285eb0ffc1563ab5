package pool

import "github.com/caddy-kvrouter/kvrouter/affinity"

// sessions are the bindings of a pool's sessions.
type sessions struct {
	*affinity.Sessions
	store *affinity.Ristretto // of the bindings
}

func newSessions(maxSessions int) (s sessions, err error) {
	if s.store, err = affinity.NewRistretto(affinity.Options{MaxSessions: maxSessions}); err != nil {
		return s, err
	}
	s.Sessions = affinity.NewSessions(s.store)
	return s, nil
}
