package kvscore

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestSimultaneousRequestsTakeTurns has pairs of requests choose at the same
// time: each spends one turn, so that a pair is spread over two targets.
func TestSimultaneousRequestsTakeTurns(t *testing.T) {
	for name, turns := range map[string]Policy{"round_robin": new(RoundRobin), "least_load": new(LeastLoad)} {
		s, ts := declared(2)
		var calls atomic.Int32
		p := choose(func(sel *Selection) int {
			calls.Add(1)
			i := turns.Choose(sel)
			runtime.Gosched() // to the other request of the pair
			return i
		})
		spread := 0
		for pair := range uint64(50) {
			var got [2]int
			var both, booked sync.WaitGroup
			booked.Add(2)
			start := make(chan struct{})
			for k := range got {
				both.Go(func() {
					sel := &Selection{Rand: seeded(pair)}
					<-start
					i, l := s.selectOf(epoch, &Request{}, ts, -1, p, sel)
					got[k] = i
					defer l.End(false, nil)
					booked.Done()
					booked.Wait()
				})
			}
			close(start)
			both.Wait()
			if got[0] != got[1] {
				spread++
			}
		}
		if spread != 50 || calls.Load() != 100 {
			t.Errorf("%s: %d of 50 pairs are spread, with %d choices", name, spread, calls.Load())
		}
	}
}

// TestInvalidChoicesAreRefused has policies that return no position, or that change the list of
// candidates: a position in it would be another target's.
func TestInvalidChoicesAreRefused(t *testing.T) {
	for name, p := range map[string]choose{
		"negative": func(*Selection) int { return -1 },
		"too high": func(*Selection) int { return 3 },
		"sorts": func(s *Selection) int {
			slices.SortFunc(s.Candidates, func(a, b Candidate) int { return a.Requests - b.Requests })
			return 0
		},
		"replaces": func(s *Selection) int {
			s.Candidates = make([]Candidate, len(s.Candidates))
			return 2
		},
		"shortens": func(s *Selection) int {
			s.Candidates = s.Candidates[1:]
			return 0
		},
	} {
		s, ts := declared(3)
		var busy []*Lease
		for _, i := range []int{0, 0, 1, 2, 2} { // the second has the least load
			_, l := s.selectOf(epoch, prompt(1), ts, i, nil, &Selection{})
			busy = append(busy, l)
		}
		sel := &Selection{Rand: seeded(1)}
		if e := s.explainOf(epoch, prompt(1), ts, -1, p, sel); !e.Fault || e.Chosen != 1 || s.Stats().PolicyFaults != 0 {
			t.Errorf("%s: explained as %+v", name, e)
		}
		i, l := s.selectOf(epoch, prompt(upTo(4)...), ts, -1, p, sel)
		if i != 1 || l.Target() != ts[1] || sel.Candidates[1].Target != ts[1] || !sel.Fault || s.Stats().PolicyFaults != 1 {
			t.Errorf("%s: chose %d, booked %s, fault %v, %d are counted", name, i, l.Target(), sel.Fault, s.Stats().PolicyFaults)
		}
		for _, l := range append(busy, l) {
			l.End(true, nil)
		}
		if _, l = s.selectOf(epoch, prompt(1), ts, -1, new(RoundRobin), sel); sel.Fault {
			t.Errorf("%s: the next choice is a fault", name)
		}
		l.End(true, nil)
		idle(t, s, ts, epoch)
	}
}

// answer books a prompt of 10,000 tokens on the first target, which prefills at the
// rate. Its answer is streamed, or has so many tokens, -1 for unknown.
func answer(s *Scheduler, ts []Target, output int64, rate float64) {
	_, l := s.selectOf(epoch, &Request{Prompt: cache.Prompt{Tokens: 10_000}, Streamed: output == streamed}, ts, 0, nil, &Selection{})
	at := epoch.Add(time.Duration(10_000 / rate * float64(time.Second)))
	if output == streamed {
		l.FirstToken(at)
	} else {
		l.Answered(at, output)
	}
	l.End(true, nil)
}

const streamed = -2

// TestWhatTeachesThePrefillRate compares the rates by the time predicted for a prompt
// of 10,000 tokens.
func TestWhatTeachesThePrefillRate(t *testing.T) {
	prior := 1e7 / newEstimator().latency().Prefill(10_000, 0, 0)
	for _, tc := range []struct {
		name    string
		do      func(s *Scheduler, ts []Target)
		low, up float64
	}{
		{"short answers, slow from the beginning", func(s *Scheduler, ts []Target) {
			for range 5 {
				answer(s, ts, shortAnswer, 2000)
			}
		}, 1900, 2200},
		{"long answers", func(s *Scheduler, ts []Target) {
			for range 500 {
				answer(s, ts, 600, 200)
				answer(s, ts, -1, 200)
			}
		}, prior, prior},
		{"streams among long answers", func(s *Scheduler, ts []Target) {
			for range 50 {
				answer(s, ts, streamed, 20_000)
				for range 33 {
					answer(s, ts, 600, 200)
				}
			}
		}, 19_000, 21_000},
	} {
		s, ts := declared(1)
		tc.do(s, ts)
		sel := &Selection{Rand: seeded(1)}
		s.explainOf(epoch, &Request{Prompt: cache.Prompt{Tokens: 10_000}}, ts, 0, new(LeastLoad), sel)
		rate := 1e7 / sel.Candidates[0].PrefillTime
		if rate < tc.low-1e-6 || rate > tc.up+1e-6 {
			t.Errorf("%s: rate %.0f, want %.0f to %.0f", tc.name, rate, tc.low, tc.up)
		}
	}
}

// TestUnknownLoadIsTheMedian offers targets that the scheduler does not know
// beside known ones.
func TestUnknownLoadIsTheMedian(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(7)
	for _, target := range ts[:5] {
		s.Declare(target, 0)
	}
	var live []*Lease
	for i, n := range []int{0, 4, 1, 2, 3} { // requests, of one block each, of 16 tokens
		for k := range n {
			_, l := s.selectOf(epoch, prompt(uint64(100*i+k)), ts, i, nil, &Selection{})
			live = append(live, l)
			l.Output(epoch, int64(16*i))
		}
	}
	sel := &Selection{Rand: seeded(1)}
	e := s.explainOf(epoch, prompt(1), ts, -1, new(LeastLoad), sel)
	if e.Chosen != 0 || sel.Unknown != 2 {
		t.Errorf("chose %d, %d are unknown; want the idle one", e.Chosen, sel.Unknown)
	}
	for i, c := range sel.Candidates {
		if unknown := i >= 5; c.Unknown != unknown {
			t.Errorf("candidate %d: unknown is %v", i, c.Unknown)
		} else if unknown && (c.Requests != 2 || c.PrefillTokens != 32 || c.PromptBlocks != 2 || c.UnsharedBlocks != 2 || c.OutputBlocks != 4) {
			t.Errorf("candidate %d: %+v", i, c)
		}
	}
	if s.explainOf(epoch, prompt(1), ts[5:], -1, new(LeastLoad), sel); sel.Unknown != 2 || sel.Candidates[0].Requests != 0 || sel.Candidates[1].Requests != 0 {
		t.Errorf("among unknown ones: %+v", sel.Candidates)
	}
	for _, l := range live {
		l.End(true, nil)
	}
	idle(t, s, ts, epoch)
}

// TestRefsOutliveTheirTargets uses references from before their targets were
// declared, forgotten, and declared again.
func TestRefsOutliveTheirTargets(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(3)
	s.Declare(ts[0], 0)
	s.Declare(ts[1], 0)
	refs, sel := s.Refs(ts...), &Selection{Rand: seeded(1)}
	s.Forget(ts[0])
	s.Declare(ts[0], 3200) // with another load
	s.Forget(ts[1])
	s.Declare(ts[2], 0)
	for i := range refs {
		_, l := s.Select(epoch, prompt(uint64(i)), refs, i, nil, sel)
		if load, ok := s.Load(epoch, ts[i]); !ok || load.Requests != 1 || l.Target() != ts[i] {
			t.Errorf("target %d: booked %+v, known %v", i, load, ok)
		}
		if unknown := i == 1; sel.Candidates[i].Unknown != unknown {
			t.Errorf("target %d: %+v", i, sel.Candidates[i])
		}
		l.End(true, nil)
	}
	_, l := s.Select(epoch, prompt(0), refs, -1, NewDynamo(), sel)
	if sel.Candidates[0].OverlapBlocks != 1 {
		t.Errorf("what the new load holds is not seen: %+v", sel.Candidates[0])
	}
	l.End(true, nil)
	idle(t, s, ts, epoch)
}
