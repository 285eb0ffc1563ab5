package kvscore

import (
	"testing"
	"time"
)

// TestAnswersWithoutWork has a target that answers at once beside one that works.
func TestAnswersWithoutWork(t *testing.T) {
	const tokens = 4000
	fresh := func(i uint64) *Request {
		r := prompt(upTo(tokens / 16)...)
		r.Root = i
		return r
	}
	for name, tc := range map[string]struct {
		answer func(l *Lease, now time.Time)
		unused bool
	}{
		"error":       {func(l *Lease, now time.Time) { l.Prefilled(now) }, true},
		"late error":  {func(l *Lease, now time.Time) { l.Prefilled(now.Add(time.Minute)) }, false},
		"first token": {func(l *Lease, now time.Time) { l.FirstToken(now) }, true},
		"cached prompt": {func(l *Lease, now time.Time) {
			l.FirstToken(now)
			l.Counted(Counts{Prompt: tokens, Cached: tokens - 1, CachedReported: true})
		}, false},
		"no answer": {func(*Lease, time.Time) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewScheduler(Settings{})
			targets := []Target{{Worker: 1}, {Worker: 2}}
			for _, target := range targets {
				s.Declare(target, 0)
			}
			sel := &Selection{Rand: seeded(1)}
			now := time.Unix(1000, 0)
			for i := range uint64(enoughAnswers) { // what is usual
				_, l := s.Select(now, fresh(10+i), targets, 1, nil, sel)
				now = now.Add(time.Minute)
				l.FirstToken(now)
				l.End(true, nil)
			}
			learned := s.latency.samples
			for i := range uint64(3) {
				_, l := s.Select(now, fresh(i), targets, 0, nil, sel)
				tc.answer(l, now.Add(time.Millisecond))
				l.End(name == "cached prompt", nil)
			}
			if n := s.latency.samples - learned; n != 0 {
				t.Errorf("%d times were learned", n)
			}
			now = now.Add(2 * time.Millisecond)
			s.Select(now, fresh(8), targets, 1, nil, sel)
			c := sel.Candidates[0]
			if (c.Requests == 3 && c.WaitTime > 2*c.PrefillTime) != tc.unused || (c.Requests == 0 && c.WaitTime == 0) == tc.unused {
				t.Errorf("%d requests and %v ms are booked, a prefill takes %v ms", c.Requests, c.WaitTime, c.PrefillTime)
			}
			if l, _ := s.Load(now, targets[0]); l.Requests != 0 {
				t.Errorf("%d requests run", l.Requests)
			}
			if s.Select(now.Add(maxIdle), fresh(9), targets, 1, nil, sel); sel.Candidates[0].Requests != 0 {
				t.Errorf("%d requests are booked after %v", sel.Candidates[0].Requests, maxIdle)
			}
			if !s.Forget(targets[0]) {
				t.Error("the target has leases")
			}
		})
	}
}

// TestTargetThatIsMuchFasterThanOthers has 16 clients, and a target that answers in a fraction of the
// time in which the others do. In the beginning, the scheduler expects about that time.
func TestTargetThatIsMuchFasterThanOthers(t *testing.T) {
	for seed := range uint64(5) {
		s, rng := NewScheduler(Settings{}), seeded(seed)
		targets := []Target{{Worker: 1}, {Worker: 2}, {Worker: 3}, {Worker: 4}}
		for _, target := range targets {
			s.Declare(target, 0)
		}
		sel := &Selection{Rand: rng}
		begun := time.Unix(1000, 0)
		now, sent, all, fast := begun, 0, 0, 0
		var busy [4]time.Time
		type client struct {
			at    time.Time
			lease *Lease
		}
		clients := make([]client, 16)
		for i := range clients {
			clients[i].at = begun.Add(time.Duration(i) * time.Millisecond)
		}
		for now.Before(begun.Add(30 * time.Second)) {
			c := &clients[0]
			for i := range clients {
				if clients[i].at.Before(c.at) {
					c = &clients[i]
				}
			}
			now = c.at
			if c.lease != nil {
				c.lease.FirstToken(now)
				c.lease.End(true, nil)
				c.lease, c.at = nil, now.Add(duration(20*rng.Float64()))
				continue
			}
			r := prompt(upTo(uint64(50 + rng.IntN(120)))...)
			r.Root, r.Streamed = uint64(1000+sent), true //nolint:gosec // small
			var i int
			i, c.lease = s.Select(now, r, targets, -1, new(PredictedLatency), sel)
			if c.at = now.Add(duration(10 + 40*rng.Float64())); i > 0 {
				busy[i] = later(busy[i], now).Add(duration(0.5 * float64(r.Tokens)))
				c.at = busy[i]
			}
			if sent++; now.Sub(begun) > 10*time.Second {
				if all++; i == 0 {
					fast++
				}
			}
		}
		if share := float64(fast) / float64(all); share > 1.3/4 {
			t.Errorf("it got %.0f %% of %d requests", 100*share, all)
		}
	}
}

// TestFasterEnginesAreBelieved has all engines become ten times as fast.
func TestFasterEnginesAreBelieved(t *testing.T) {
	s := NewScheduler(Settings{})
	targets := []Target{{Worker: 1}, {Worker: 2}}
	sel, now := &Selection{Rand: seeded(1)}, time.Unix(1000, 0)
	answer := func(i int, ms float64) {
		r := prompt(upTo(uint64(120 + 7*(i%7)))...)
		r.Root = uint64(i) //nolint:gosec // small
		_, l := s.Select(now, r, targets, i%2, nil, sel)
		now = now.Add(duration(ms))
		l.FirstToken(now)
		l.End(true, nil)
		now = now.Add(time.Second)
	}
	for i := range 100 {
		answer(i, 200)
	}
	for i := range 100 {
		answer(100+i, 20)
	}
	if p := s.latency.latency().Prefill(2300, 0, 0); p > 40 {
		t.Errorf("a prefill is predicted to take %v ms, want about 20", p)
	}
}
