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

// TestNewSessionsSpread counts the sessions of each target. A further target takes its share
// of them, and no session moves between the others.
func TestNewSessionsSpread(t *testing.T) {
	const sessions, n = 4000, 8
	p := NewPredictedLatency()
	before, after := make(map[Target]int), make(map[Target]int)
	moved, more := 0, targets(n+1)
	for session := range uint64(sessions) {
		session = mix(session)
		a, b := first(t, p, session, more[:n]), first(t, p, session, more)
		before[a]++
		after[b]++
		if a == b {
			continue
		}
		if moved++; b != more[n] {
			t.Errorf("session %x moves from %s to %s", session, a, b)
		}
	}
	for _, v := range []struct {
		n    int
		got  map[Target]int
		most float64 // chi-square, which is more once in 1,000 times
	}{{n, before, 24.3}, {n + 1, after, 26.1}} {
		chi, mean := 0.0, float64(sessions)/float64(v.n)
		for _, target := range more[:v.n] {
			d := float64(v.got[target]) - mean
			chi += d * d / mean
		}
		if chi > v.most {
			t.Errorf("%d targets: %v, chi-square %.1f", v.n, v.got, chi)
		}
	}
	if share := sessions / (n + 1); moved < share*8/10 || moved > share*12/10 {
		t.Errorf("%d of %d sessions moved to a ninth target", moved, sessions)
	}
}

// TestLoadOutweighsRendezvous books many requests of one session at once. They spread, for
// only the first finds equal targets.
func TestLoadOutweighsRendezvous(t *testing.T) {
	for name, p := range tiePolicies() {
		s, ts, sel := NewScheduler(Settings{}), targets(4), &Selection{Rand: seeded(1)}
		got := make([]int, len(ts))
		for _, target := range ts {
			s.Declare(target, 0)
		}
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
