package kvscore

import (
	"math"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

func after(ms float64) time.Time { return epoch.Add(time.Duration(ms * float64(time.Millisecond))) }

// book books a prompt on the first target, of which no target holds anything.
func book(s *Scheduler, ts []Target, tokens int64, at time.Time) *Lease {
	_, l := s.Select(at, &Request{Prompt: cache.Prompt{Tokens: tokens}, Streamed: true}, ts[:1], 0, nil, &Selection{Rand: seeded(1)})
	return l
}

// alone returns the predicted time for a prompt of the given tokens, without the fixed
// part.
func alone(s *Scheduler, tokens int64) float64 {
	return s.latency.predict(featuresOf(0, workOf(tokens, 0), 0))
}

// waits returns the wait on the first target.
func waits(s *Scheduler, ts []Target, at time.Time) float64 {
	sel := &Selection{Rand: seeded(1)}
	s.Explain(at, &Request{Prompt: cache.Prompt{Tokens: 16}}, ts, 0, new(LeastLoad), sel)
	return sel.Candidates[0].WaitTime
}

func TestWaitAges(t *testing.T) {
	s, ts := declared(1)
	first, second := alone(s, 10_000), alone(s, 2000)
	fixed := s.latency.predict(featuresOf(1, work{}, 0))
	a := book(s, ts, 10_000, epoch)
	b := book(s, ts, 2000, after(10))
	for _, c := range []struct {
		name     string
		at, want float64
	}{
		{"nothing has run", 0, first + second},
		{"the first one has run", 100, first - 100 + second},
		{"it should be over", first, second},
		{"it may take a step longer", first + fixed, second},
		{"it is overdue, and expected to be as late again", first + fixed + 70, second + 70},
		{"it is far overdue", 1e7, second + maxOverdue},
	} {
		if got := waits(s, ts, after(c.at)); math.Abs(got-c.want) > 0.01 {
			t.Errorf("%s: wait %.2f ms, want %.2f", c.name, got, c.want)
		}
	}
	a.FirstToken(after(500)) // overdue no more: the second one begins
	for at, want := range map[float64]float64{500: second, 520: second - 20, 500 + second + fixed + 30: 30} {
		if got := waits(s, ts, after(at)); math.Abs(got-want) > 0.01 {
			t.Errorf("after the first token, at %.1f ms: wait %.2f ms, want %.2f", at, got, want)
		}
	}
	b.FirstToken(after(600))
	if got := waits(s, ts, after(700)); got != 0 {
		t.Errorf("wait %.2f ms though all prefills are over", got)
	}
	a.End(true, nil)
	b.End(true, nil)
	idle(t, s, ts, after(700))
}
