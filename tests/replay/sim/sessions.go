package sim

import (
	"encoding/binary"
	"fmt"
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
	store *affinity.Bindings
	now   atomic.Int64 // virtual; the store's sweeper reads it, too
}

func newSessions(j affinity.Journal) (*sessions, error) {
	s := new(sessions)
	var err error
	s.store, err = affinity.NewBindings(affinity.Options{
		Journal: j,
		Clock:   func() time.Time { return epoch.Add(time.Duration(s.now.Load())) },
	})
	return s, err
}

// sessionKey returns the key of a session's binding.
func sessionKey(session int) (k affinity.Key) {
	binary.BigEndian.PutUint64(k[:], uint64(session)+1) //nolint:gosec // not negative
	return k
}

// bound returns the engine that the session is bound to, -1 if there is none, and
// the version of the binding.
func (s *sessions) bound(session int) (at int, version affinity.Version) {
	b, ok := s.store.Peek(sessionKey(session))
	if !ok {
		return -1, 0
	}
	return int(b.Target.Worker) - 1, b.Version
}

// answered binds the session to the target that answers it, or keeps it there,
// unless another turn has bound it since this one was placed.
func (s *sessions) answered(session int, version affinity.Version, t kvscore.Target) error {
	if _, _, err := s.store.Bind(sessionKey(session), version, affinity.Want{Target: t, TTL: sessionTTL}); err != nil {
		return fmt.Errorf("binding session %d: %w", session, err)
	}
	return nil
}

// ended renews the binding at the end of a turn.
func (s *sessions) ended(session int) {
	if b, ok := s.store.Peek(sessionKey(session)); ok { // one that lapsed stays so
		_, _ = s.store.Touch(sessionKey(session), b.Version) //nolint:dogsled // the same
	}
}
