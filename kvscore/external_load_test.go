package kvscore

import (
	"testing"
	"time"
)

// look returns the terms of a target for a prompt at a time, and books nothing.
func (s *Scheduler) look(at time.Time, r *Request, t Target) Candidate {
	sel := &Selection{Rand: seeded(1)}
	s.explainOf(at, r, []Target{t}, -1, NewPredictedLatency(), sel)
	return sel.Candidates[0]
}

// TestOtherClientsLoadIsWhatLeasesLeave has an engine that reports the router's own requests
// with those of other clients.
func TestOtherClientsLoadIsWhatLeasesLeave(t *testing.T) {
	s, ts := declared(1)
	sel := &Selection{Rand: seeded(1)}
	var leases []*Lease
	for i := range uint64(3) {
		_, l := s.selectOf(epoch, prompt(distinct(i, 100)...), ts, 0, nil, sel)
		leases = append(leases, l)
	}
	leases[0].FirstToken(epoch) // one decodes, two await their prefill
	for _, tc := range []struct {
		name     string
		reported EngineLoad
		requests int // of all clients
		external int
		awaiting int
		tokens   int64
	}{
		{"own only", EngineLoad{2, 1, 3200}, 3, 0, 2, 3200},
		{"own, not all arrived", EngineLoad{1, 0, 0}, 3, 0, 2, 3200},
		{"two more run", EngineLoad{4, 1, 3200}, 5, 2, 2, 3200},
		{"own ones wait too", EngineLoad{1, 4, 3200}, 5, 2, 4, 3200},
		{"others wait, tokens known", EngineLoad{3, 6, 5200}, 9, 6, 6, 5200},
		{"others wait, tokens unknown", EngineLoad{3, 6, -1}, 9, 6, 6, 3200 + 4*1600},
		{"fewer wait than are booked", EngineLoad{9, 1, -1}, 10, 7, 2, 3200},
	} {
		s.ReportLoad(epoch, ts[0], tc.reported)
		s.ReportLoad(epoch, ts[0], tc.reported)
		c := s.look(epoch, prompt(distinct(99, 10)...), ts[0])
		if c.Requests != tc.requests || c.External != tc.external || c.Awaiting != tc.awaiting || c.PrefillTokens != tc.tokens {
			t.Errorf("%s: %d requests, %d of others, %d await their prefill of %d tokens; want %+v", tc.name, c.Requests, c.External, c.Awaiting, c.PrefillTokens, tc)
		}
		l, _ := s.Load(epoch, ts[0])
		if l.Requests != 3 || l.PrefillTokens != 3200 || l.Engine != tc.reported || l.External != tc.external || !l.EngineAt.Equal(epoch) {
			t.Errorf("%s: the load is %+v", tc.name, l)
		}
	}
	for _, l := range leases {
		l.End(true, nil)
	}
	idle(t, s, ts, epoch)
}

// TestOtherClientsWaitingCostsTime compares two targets, one of which has a queue of other
// clients' requests.
func TestOtherClientsWaitingCostsTime(t *testing.T) {
	s, ts := declared(2)
	for range 2 {
		s.ReportLoad(epoch, ts[0], EngineLoad{Running: 8, Waiting: 4, WaitingTokens: 40_000})
	}
	r := prompt(upTo(100)...)
	busy, free := s.look(epoch, r, ts[0]), s.look(epoch, r, ts[1])
	if want := 4 * (s.Stats().Latency.Prefill(10_000, 0, 0) - s.Stats().Latency.Fixed); !near(busy.WaitTime, want, 0.01) || free.WaitTime != 0 {
		t.Errorf("the waits are %.1f and %.1f ms, want %.1f and 0", busy.WaitTime, free.WaitTime, want)
	}
	for _, p := range []Policy{NewPredictedLatency(), NewDynamo(), new(LeastLoad)} {
		sel := &Selection{Rand: seeded(1)}
		if e := s.explainOf(epoch, r, ts, -1, p, sel); e.Chosen != 1 || len(e.Drawn) > 0 {
			t.Errorf("%T takes the busy target: %+v", p, sel.Candidates)
		}
	}
}

// TestReportsGrowOld has reports stop. Unknown is not a correction.
func TestReportsGrowOld(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(1)
	r := prompt(upTo(10)...)
	s.ReportLoad(epoch, ts[0], EngineLoad{Running: 5}) // unknown target
	s.Declare(ts[0], 0)
	if c := s.look(epoch, r, ts[0]); c.Requests != 0 {
		t.Errorf("a report of an unknown target counts: %d requests", c.Requests)
	}
	s.ReportLoad(epoch, ts[0], EngineLoad{Running: 5, WaitingTokens: -1})
	for age, want := range map[time.Duration]int{0: 5, externalTime: 5, externalTime + 1: 0} {
		if c := s.look(epoch.Add(age), r, ts[0]); c.Requests != want || c.External != want {
			t.Errorf("after %v: %d requests, want %d", age, c.Requests, want)
		}
		if l, _ := s.Load(epoch.Add(age), ts[0]); l.External != want || l.EngineAt.IsZero() != (want == 0) {
			t.Errorf("after %v: the load is %+v", age, l)
		}
	}
}

// TestOneReportTooManyIsNoLoad has a report that still includes a request of the router which
// has just ended, and then load that stays.
func TestOneReportTooManyIsNoLoad(t *testing.T) {
	s, ts := declared(1)
	r := prompt(upTo(10)...)
	for i, step := range []struct{ reported, want int }{{0, 0}, {1, 0}, {0, 0}, {3, 0}, {4, 3}, {1, 1}, {0, 0}} {
		at := epoch.Add(time.Duration(i) * time.Second)
		s.ReportLoad(at, ts[0], EngineLoad{Running: step.reported, WaitingTokens: -1})
		if c := s.look(at, r, ts[0]); c.Requests != step.want {
			t.Errorf("report %d of %d requests: %d count, want %d", i, step.reported, c.Requests, step.want)
		}
	}
}

// TestWaitsForOthersTeachNothing has prefills that wait behind those of other clients. They say
// nothing of the target's speed.
func TestWaitsForOthersTeachNothing(t *testing.T) {
	s, ts := declared(1)
	sel := &Selection{Rand: seeded(1)}
	for i, waiting := range []int{3, 0} {
		s.ReportLoad(epoch, ts[0], EngineLoad{Running: 1, Waiting: waiting, WaitingTokens: -1})
		_, l := s.selectOf(epoch, prompt(distinct(uint64(i), 100)...), ts, 0, nil, sel)
		l.FirstToken(epoch.Add(time.Second))
		l.End(true, nil)
		if n := s.Stats().Timings; n != uint64(i) {
			t.Errorf("with %d waiting requests of others, there are %d timings", waiting, n)
		}
	}
}
