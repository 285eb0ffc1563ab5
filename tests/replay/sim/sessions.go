package sim

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// sessionTTL is how long the router remembers a session by default.
const sessionTTL = 5 * time.Minute

// sessions binds sessions to targets as the router does: hard, in its own store. A
// session is bound where its first answer begins, stays there whatever the load, and
// is forgotten some time after its last turn.
type sessions struct {
	store *affinity.Ristretto
	now   atomic.Int64 // virtual; the store's sweeper reads it, too
}

func newSessions() (*sessions, error) {
	s := new(sessions)
	var err error
	s.store, err = affinity.NewRistretto(affinity.Options{
		Clock: func() time.Time { return epoch.Add(time.Duration(s.now.Load())) },
	})
	return s, err
}

func sessionKey(session int) string { return strconv.Itoa(session) }

// bound returns the engine that the session is bound to, -1 if there is none, and
// the version of the binding.
func (s *sessions) bound(session int) (at int, version uint64) {
	b, ok := s.store.Peek(sessionKey(session))
	if !ok {
		return -1, 0
	}
	return int(b.Target.Worker) - 1, b.Version
}

// answered binds the session to the target that answers it, or keeps it there,
// unless another turn has bound it since this one was placed.
func (s *sessions) answered(session int, version uint64, t kvscore.Target) error {
	if _, _, err := s.store.CompareAndSwap(sessionKey(session), version, t, sessionTTL, affinity.RouterOnly); err != nil {
		return fmt.Errorf("binding session %d: %w", session, err)
	}
	return nil
}

// ended renews the binding at the end of a turn.
func (s *sessions) ended(session int) { s.store.Get(sessionKey(session)) }
