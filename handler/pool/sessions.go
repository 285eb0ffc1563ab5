package pool

import "github.com/caddy-kvrouter/kvrouter/affinity"

// sessions are the bindings of a pool's sessions.
type sessions struct {
	*affinity.Sessions
	store *affinity.Ristretto // of the bindings
}

// newSessions returns an empty store. ended gets the ends of engine-backed bindings.
func newSessions(maxSessions int, ended func(affinity.Key, affinity.Want)) (s sessions, err error) {
	if s.store, err = affinity.NewRistretto(affinity.Options{
		MaxSessions: maxSessions,
		OnExpire:    func(key affinity.Key, b affinity.Binding, _ affinity.Reason) { ended(key, b.Want) },
	}); err != nil {
		return s, err
	}
	s.Sessions = affinity.NewSessions(s.store)
	return s, nil
}

// Ended returns how many bindings have Expired or were Evicted.
func (s *sessions) Ended(why affinity.Reason) uint64 { return s.store.Ended(why) }
