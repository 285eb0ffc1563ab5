package kvscore

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// The tests of this file hold PredictedLatency to laws that must be true of any pool, whatever
// the scheduler has learned of it.

// drawn returns a selection among some candidates with anything booked and learned.
func drawn(r *rand.Rand) *Selection {
	up := func(most float64) float64 { return most * r.Float64() * r.Float64() }
	s := &Selection{
		Findings: Findings{Tokens: 1 + r.Int64N(50_000)}, BlockSize: 16, Rand: r, BoundTarget: -1, ArrivalRate: up(0.01), ExpectedAnswer: up(2000), MeanAnswer: up(2000),
		Latency: Latency{Fixed: up(50), Token: up(0.2), Attention: up(1e-5), Context: up(1e-4)},
	}
	for i := range 2 + r.IntN(127) {
		c := Candidate{
			Target: Target{Worker: uint64(i)}, Slowness: math.Exp(r.Float64()*4 - 2), RecentWork: up(1e5), //nolint:gosec // not negative
			memory: up(3000), full: r.Float64(), step: up(2000), rested: time.Duration(r.Int64N(1000)),
		}
		if r.IntN(3) > 0 {
			c.OverlapTokens = r.Int64N(s.Tokens)
		}
		c.PrefillTime = c.Slowness * s.Latency.Prefill(s.Tokens-c.OverlapTokens, c.OverlapTokens, 0)
		if r.IntN(3) > 0 {
			c.Requests = 1 + r.IntN(200)
			c.Awaiting = r.IntN(c.Requests + 1)
			c.WaitTime = float64(c.Awaiting) * up(2000)
		}
		s.Candidates = append(s.Candidates, c)
	}
	return s
}

// shared gives a selection a prefix that some candidates hold.
func (s *Selection) shared(r *rand.Rand) {
	s.SharedTokens, s.SharedArrivals = float64(s.Tokens)*r.Float64(), r.IntN(1000)
	for i := range s.Candidates {
		if float64(s.Candidates[i].OverlapTokens) >= s.SharedTokens {
			s.SharedHolders++
		}
	}
}

// TestNoIdleBesideAQueue: a target with nothing booked is passed over only if its prefill takes
// longer than the wait at the chosen one.
func TestNoIdleBesideAQueue(t *testing.T) {
	r, p := seeded(1), NewPredictedLatency()
	for range 3000 {
		s := drawn(r)
		if r.IntN(2) == 0 {
			s.shared(r)
		}
		chosen := &s.Candidates[p.Choose(s)]
		for i := range s.Candidates {
			if c := &s.Candidates[i]; c.Requests == 0 && c.PrefillTime < chosen.WaitTime {
				t.Fatalf("an idle target would take %.0f ms, and the request waits %.0f ms", c.PrefillTime, chosen.WaitTime)
			}
		}
	}
}

// TestCostsFollowBookings: another request on a target never makes it cheaper, and changes no other one's cost
// but by spread. What later requests gain by a copy follows the load of the target that holds the prefix. What
// an idle target gains, or one whose turn it is, follows the cheapest one.
func TestCostsFollowBookings(t *testing.T) {
	r, p := seeded(2), NewPredictedLatency()
	costs := func(s *Selection) (all, without []float64) {
		p.Choose(s)
		for i := range s.Candidates {
			c := &s.Candidates[i]
			all, without = append(all, c.Cost), append(without, c.Cost-c.Terms.Spread)
		}
		return all, without
	}
	for range 2000 {
		s := drawn(r)
		if r.IntN(2) == 0 {
			s.shared(r)
		}
		whole, before := costs(s)
		at := r.IntN(len(s.Candidates))
		c := &s.Candidates[at]
		c.Requests++
		c.Awaiting++
		c.WaitTime += 1 + 2000*r.Float64()
		dearer, after := costs(s)
		if dearer[at] < whole[at]*(1-1e-6) {
			t.Fatalf("the cost of a target fell from %.1f to %.1f with a request more", whole[at], dearer[at])
		}
		for i := range after {
			if i != at && !near(after[i], before[i], 1e-6) {
				t.Fatalf("a request on another target changes a cost from %.1f to %.1f", before[i], after[i])
			}
		}
	}
}

// queueing is a pool in virtual time: each target computes one prompt at a time.
type queueing struct {
	s       *Scheduler
	targets []Target
	ends    []time.Time // when each target has computed all that it has
	running []computing
	truth   Latency
}

type computing struct {
	lease *Lease
	first time.Time
}

// send lets the policy choose for a prompt.
func (q *queueing) send(now time.Time, p Policy, r *Request, bound int, sel *Selection) {
	q.until(now)
	at, l := q.s.selectOf(now, r, q.targets, bound, p, sel)
	c := &sel.Candidates[at]
	start := q.ends[at]
	if start.Before(now) {
		start = now
	}
	took := q.truth.Prefill(sel.Tokens-c.OverlapTokens, c.OverlapTokens, 0)
	q.ends[at] = start.Add(time.Duration(took * float64(time.Millisecond)))
	q.running = append(q.running, computing{l, q.ends[at]})
}

// until ends what is over by then.
func (q *queueing) until(now time.Time) {
	for {
		next := -1
		for i := range q.running {
			if e := q.running[i].first; !e.After(now) && (next < 0 || e.Before(q.running[next].first)) {
				next = i
			}
		}
		if next < 0 {
			return
		}
		one := q.running[next]
		q.running = append(q.running[:next], q.running[next+1:]...)
		one.lease.FirstToken(one.first)
		one.lease.End(true, nil)
	}
}

// longest returns the longest wait.
func (q *queueing) longest(now time.Time) (d time.Duration) {
	for _, end := range q.ends {
		d = max(d, end.Sub(now))
	}
	return d
}

// TestNoLockIn: a backlog on one target, and arrivals below saturation that all share its prefix.
// The scheduler has learned times that are wrong by up to a factor of 4. When least_load has
// worked the backlog off, the longest wait is at most twice as long as with it, or short.
func TestNoLockIn(t *testing.T) {
	for seed := range uint64(12) {
		r := seeded(seed)
		n, system := 2+r.IntN(15), uint64(32+r.IntN(1000))
		truth := Latency{Fixed: 8, Token: 0.04, Attention: 1.5e-6}
		wrong := func(v float64) float64 { return v * math.Exp((2*r.Float64()-1)*math.Log(4)) }
		learned := Learned{Samples: 100, Latency: [nFeatures]float64{wrong(8), wrong(40), wrong(1.5), wrong(3)}}
		backlog := time.Duration(2+r.IntN(8)) * time.Second
		hit := truth.Prefill(200, int64(16*system), 0)
		gap := hit / float64(n) / 0.7
		longest := func(p Policy) time.Duration {
			r := seeded(seed + 1000)
			q := &queueing{s: NewScheduler(Settings{}), targets: targets(n), ends: make([]time.Time, n), truth: truth}
			for _, target := range q.targets {
				q.s.Declare(target, 500_000)
			}
			q.s.RestoreLearned(epoch, &learned)
			sel, number := &Selection{Rand: r}, uint64(1e6)
			ask := func() *Request {
				a := &Request{Prompt: cache.Prompt{Root: 1, BlockTokens: 16, Tokens: int64(16*system) + 200}, Streamed: true}
				for b := range system {
					a.Blocks = append(a.Blocks, b+1)
				}
				number++
				a.Blocks = append(a.Blocks, number)
				return a
			}
			for q.longest(epoch) < backlog {
				q.send(epoch, p, ask(), 0, sel)
			}
			now := epoch
			for now.Before(epoch.Add(2 * backlog)) {
				now = now.Add(time.Duration(r.ExpFloat64() * gap * float64(time.Millisecond)))
				q.send(now, p, ask(), -1, sel)
			}
			d := q.longest(now)
			q.until(now.Add(time.Hour))
			return d
		}
		cold := time.Duration(truth.Prefill(int64(16*system)+200, 0, 0) * float64(time.Millisecond))
		if ours, least := longest(NewPredictedLatency()), longest(new(LeastLoad)); ours > 2*least+cold {
			t.Errorf("seed %d, %d targets: the longest wait is %v after a backlog of %v, with least_load %v", seed, n, ours, backlog, least)
		}
	}
}

// TestCoefficientsStayWithinWhatSamplesShow: after long prompts, thousands of short ones behind a
// long prefix. What the long ones have shown stays.
func TestCoefficientsStayWithinWhatSamplesShow(t *testing.T) {
	for _, factor := range []float64{0.5, 1, 3} {
		truth, e, r := Latency{8 * factor, 0.04 * factor, 1.5e-6 * factor, 5e-5 * factor}, newEstimator(), seeded(1)
		learn := func(n, k int64) {
			context := 1e5 * r.Float64()
			e.learn(featuresOf(1, workOf(n, k), context), truth.Prefill(n, k, context)*(0.8+0.4*r.Float64())+5*r.Float64())
		}
		for range 100 {
			learn(r.Int64N(20_000), 0)
		}
		for range 5000 {
			learn(50+r.Int64N(300), 16_384)
		}
		l := e.latency()
		if got, want := l.Prefill(16_384, 0, 0), truth.Prefill(16_384, 0, 0); !near(got, want, 0.35) {
			t.Errorf("a long prompt is predicted to take %.0f ms, want about %.0f: %+v", got, want, l)
		}
	}
}
