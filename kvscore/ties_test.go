package kvscore

import (
	"slices"
	"testing"
	"time"
)

// first returns the target that a new scheduler chooses for a session among idle targets.
func first(t *testing.T, p Policy, session uint64, ts []Target) Target {
	t.Helper()
	s := NewScheduler(Settings{})
	r := prompt(upTo(10)...)
	r.Session = session
	sel := &Selection{Rand: seeded(session)}
	dry := s.Explain(epoch, r, ts, -1, p, sel)
	i, l := s.Select(epoch, r, ts, -1, p, sel)
	l.End(true, nil)
	if session != 0 && len(ts) > 1 && (dry.Chosen != i || dry.Drawn != nil) {
		t.Errorf("session %d goes to %d, explained as %d, by chance among %v", session, i, dry.Chosen, dry.Drawn)
	}
	return ts[i]
}

func tiePolicies() map[string]Policy {
	return map[string]Policy{"predicted_latency": NewPredictedLatency(), "dynamo": NewDynamo(), "least_load": &LeastLoad{}}
}

// TestRoutersAgreeOnANewSession has two routers with the same targets in another order. One
// of them has served other sessions and requests before.
func TestRoutersAgreeOnANewSession(t *testing.T) {
	here := targets(5)
	for i := range here {
		here[i].Rank = uint32(i % 2) //nolint:gosec // small
	}
	there := slices.Clone(here)
	slices.Reverse(there)
	theirs := tiePolicies()
	for name, p := range tiePolicies() {
		for session := range uint64(200) {
			first(t, theirs[name], 0, there) // without a session: by the fair share
			session = mix(session)
			if a, b := first(t, p, session, here), first(t, theirs[name], session, there); a != b {
				t.Fatalf("%s: session %x goes to %s here and to %s there", name, session, a, b)
			}
		}
	}
}

// TestLoadOutweighsRendezvous books many requests of one session at once. They spread, for
// only the first finds equal targets.
func TestLoadOutweighsRendezvous(t *testing.T) {
	for name, p := range tiePolicies() {
		s, ts := declared(4)
		sel := &Selection{Rand: seeded(1)}
		got := make([]int, len(ts))
		for i := range 40 {
			r := prompt(uint64(2*i+1), uint64(2*i+2))
			r.Session = 17
			at, _ := s.Select(epoch.Add(time.Duration(i)*time.Microsecond), r, ts, -1, p, sel)
			got[at]++
		}
		if slices.Max(got) > 12 {
			t.Errorf("%s: %v", name, got)
		}
	}
}
