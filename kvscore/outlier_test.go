package kvscore

import (
	"testing"
	"time"
)

func ms(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// TestRequestsThatFailBookNothing has a target refuse long prompts of one client, and of many beside
// targets that refuse as many.
func TestRequestsThatFailBookNothing(t *testing.T) {
	for name, sessions := range map[string]uint64{"one session": 1, "many sessions": 50} {
		s, targets := declared(2)
		sel, now := &Selection{Rand: seeded(1)}, epoch
		for i := range uint64(50) {
			for bound := range 2 {
				r := prompt(upTo(5000)...)
				r.Root, r.Session = i, 1+i%sessions
				_, l := s.selectOf(now, r, targets, bound, nil, sel)
				now = now.Add(time.Millisecond)
				if bound == 0 || sessions > 1 {
					l.Failed(now)
				} else {
					now = now.Add(time.Second)
					l.FirstToken(now)
				}
				l.End(false, nil)
			}
		}
		s.explainOf(now, prompt(1), targets, -1, new(LeastLoad), sel)
		c := &sel.Candidates[0]
		if c.Outlier || c.Requests != 0 || c.WaitTime != 0 || c.PrefillTokens != 0 || c.RecentWork > 60 {
			t.Errorf("%s: what the first target refused stays booked: %+v", name, c)
		}
		if l, _ := s.Load(now, targets[0]); l.Outlier || l.Requests != 0 || l.Errors == 0 {
			t.Errorf("%s: load %+v", name, l)
		}
	}
}

// TestOutlierGetsItsShare has 16 clients, and a worker that answers in a fraction of the time in which
// its peers do, with tokens or with errors. In the beginning, the scheduler expects about that time.
func TestOutlierGetsItsShare(t *testing.T) {
	type policies = map[string]func() Policy
	for name, policy := range (policies{
		"predicted_latency": func() Policy { return NewPredictedLatency() },
		"least_load":        func() Policy { return new(LeastLoad) },
		"power_of_two":      func() Policy { return new(PowerOfTwo) },
		"dynamo":            func() Policy { return NewDynamo() },
	}) {
		for _, o := range []outlier{
			{workers: 2, ranks: 1},
			{workers: 4, ranks: 1},
			{workers: 2, ranks: 1, fails: true},
			{workers: 4, ranks: 1, fails: true},
			{workers: 4, ranks: 4, fails: true},
			{workers: 4, ranks: 1, fails: true, well: 9 * time.Second},
		} {
			if share := o.share(policy()); share > 1.3/float64(o.workers) {
				t.Errorf("%s, %+v: it got %.0f %% of the requests", name, o, 100*share)
			}
		}
	}
}

// outlier is a pool whose first worker answers at once.
type outlier struct {
	workers, ranks int
	fails          bool
	well           time.Duration // before that
}

// share returns the first worker's share of the requests from the 10th to the 30th second.
func (o outlier) share(p Policy) float64 {
	s, rng := NewScheduler(Settings{}), seeded(1)
	var targets []Target
	for i := range o.workers {
		for rank := range o.ranks {
			targets = append(targets, Target{Worker: 1 + uint64(i), Rank: uint32(rank)}) //nolint:gosec // small
			s.Declare(targets[len(targets)-1], 0)
		}
	}
	sel := &Selection{Rand: rng}
	begun := time.Unix(1000, 0)
	now, sent, all, fast := begun, 0, 0, 0
	busy := make([]time.Time, len(targets))
	type client struct {
		at    time.Time
		lease *Lease
	}
	clients := make([]client, 16*o.ranks)
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
		if l := c.lease; l != nil {
			failed := o.fails && l.Target().Worker == 1 && now.Sub(begun) > o.well
			if failed {
				l.Failed(now)
			} else {
				l.FirstToken(now)
			}
			l.End(!failed, nil)
			c.lease, c.at = nil, now.Add(ms(20*rng.Float64()))
			continue
		}
		r := prompt(upTo(uint64(50 + rng.IntN(120)))...)
		r.Root, r.Streamed = uint64(1000+sent), true //nolint:gosec // small
		var i int
		i, c.lease = s.selectOf(now, r, targets, -1, p, sel)
		first := targets[i].Worker == 1
		if c.at = now.Add(ms(10 + 40*rng.Float64())); !first || now.Sub(begun) < o.well {
			if busy[i].Before(now) {
				busy[i] = now
			}
			busy[i] = busy[i].Add(ms(0.5 * float64(r.Tokens)))
			c.at = busy[i]
		}
		if sent++; now.Sub(begun) > 10*time.Second {
			if all++; first {
				fast++
			}
		}
	}
	return float64(fast) / float64(all)
}

// TestShortTimesAreNoise has a worker answer small prompts in a tenth of the time of its peer.
func TestShortTimesAreNoise(t *testing.T) {
	s, targets := declared(2)
	sel, now := &Selection{Rand: seeded(1)}, epoch
	for i := range 100 {
		r := prompt(upTo(20)...)
		r.Root, r.Streamed = uint64(i), true //nolint:gosec // small
		_, l := s.selectOf(now, r, targets, i%2, nil, sel)
		now = now.Add(ms(1 + 9*float64(i%2)))
		l.FirstToken(now)
		l.End(true, nil)
	}
	if s.explainOf(now, prompt(1), targets, -1, new(LeastLoad), sel); sel.Candidates[0].Outlier {
		t.Error("a worker is an outlier for some milliseconds")
	}
}

// TestFasterEnginesAreBelieved has all engines become ten times as fast.
func TestFasterEnginesAreBelieved(t *testing.T) {
	s, targets := declared(2)
	sel, now := &Selection{Rand: seeded(1)}, epoch
	answer := func(i int, took float64) {
		r := prompt(upTo(uint64(120 + 7*(i%7)))...)
		r.Root = uint64(i) //nolint:gosec // small
		_, l := s.selectOf(now, r, targets, i%2, nil, sel)
		now = now.Add(ms(took))
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

// TestMistakesOfClientsAreNoSign has many clients make mistakes at one of two targets: it holds the document
// that they ask about. Errors that are the target's own are a sign.
func TestMistakesOfClientsAreNoSign(t *testing.T) {
	for name, end := range map[string]func(*Lease, time.Time){"mistakes": (*Lease).Mistaken, "errors": (*Lease).Failed} {
		s, targets := declared(2)
		sel, now := &Selection{Rand: seeded(1)}, epoch
		for i := range uint64(40) {
			for bound := range 2 {
				r := prompt(upTo(500)...)
				r.Session = 1 + i
				_, l := s.selectOf(now, r, targets, bound, nil, sel)
				if now = now.Add(100 * time.Millisecond); bound == 0 {
					end(l, now)
				} else {
					l.FirstToken(now)
				}
				l.End(false, nil)
			}
		}
		_, l := s.selectOf(now, prompt(1), targets, -1, new(LeastLoad), sel)
		l.End(false, nil)
		if load, _ := s.Load(now, targets[0]); load.ErrorsApart() != (name == "errors") {
			t.Errorf("%s: errors apart is %v with a share of %.2f", name, load.ErrorsApart(), load.Errors)
		}
	}
}
