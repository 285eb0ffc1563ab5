package storetest

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/affinity"
)

func TestRistretto(t *testing.T) {
	Run(t, func() affinity.Store { return openRistretto(t) })
}

// TestSessions runs the suite on sessions, which are a store, too.
func TestSessions(t *testing.T) {
	Run(t, func() affinity.Store { return affinity.NewSessions(openRistretto(t)) })
}

// TestSessionsOverAnyStore hides what only the store in memory can.
func TestSessionsOverAnyStore(t *testing.T) {
	Run(t, func() affinity.Store {
		return affinity.NewSessions(struct{ affinity.Store }{openRistretto(t)})
	})
}

func openRistretto(t *testing.T) *affinity.Ristretto {
	r, err := affinity.NewRistretto(affinity.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}
