package pool

import (
	"crypto/rand"
	"crypto/sha256"

	"github.com/caddy-kvrouter/kvrouter/affinity"
)

// sessions are the bindings of a pool's sessions.
type sessions struct {
	*affinity.Sessions
	store  *affinity.Ristretto // of the bindings
	secret [32]byte            // of the keys
}

func newSessions(maxSessions int) (s sessions, err error) {
	if s.store, err = affinity.NewRistretto(affinity.Options{MaxSessions: maxSessions}); err != nil {
		return s, err
	}
	_, _ = rand.Read(s.secret[:]) // it never fails
	s.Sessions = affinity.NewSessions(s.store)
	return s, nil
}

// Key returns the key of the binding of a session. It is a hash with the pool's secret: nobody
// outside can choose names whose keys collide, and a key does not reveal the name.
func (s *sessions) Key(name string) (k affinity.Key) {
	buf := append(make([]byte, 0, 512), s.secret[:]...)
	sum := sha256.Sum256(append(buf, name...))
	copy(k[:], sum[:])
	return k
}
