package kvscore

import (
	"testing"
	"time"
)

// TestMistakesOfClientsAreNoSign has many clients make mistakes at one of two targets: it holds the document
// that they ask about. Errors that are the target's own are a sign.
func TestMistakesOfClientsAreNoSign(t *testing.T) {
	for name, end := range map[string]func(*Lease, time.Time){"mistakes": (*Lease).Mistaken, "errors": (*Lease).Failed} {
		s, sel, now := NewScheduler(Settings{}), &Selection{Rand: seeded(1)}, time.Unix(1000, 0)
		targets := []Target{{Worker: 1}, {Worker: 2}}
		for _, target := range targets {
			s.Declare(target, 0)
		}
		for i := range uint64(40) {
			for bound := range 2 {
				r := prompt(upTo(500)...)
				r.Session = 1 + i
				_, l := s.Select(now, r, targets, bound, nil, sel)
				if now = now.Add(100 * time.Millisecond); bound == 0 {
					end(l, now)
				} else {
					l.FirstToken(now)
				}
				l.End(false, nil)
			}
		}
		_, l := s.Select(now, prompt(1), targets, -1, new(LeastLoad), sel)
		l.End(false, nil)
		if load, _ := s.Load(now, targets[0]); load.ErrorsApart() != (name == "errors") {
			t.Errorf("%s: errors apart is %v with a share of %.2f", name, load.ErrorsApart(), load.Errors)
		}
	}
}
