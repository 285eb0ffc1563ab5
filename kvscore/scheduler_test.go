package kvscore

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

var epoch = time.Unix(1_700_000_000, 0)

func targets(n int) []Target {
	list := make([]Target, n)
	for i := range list {
		list[i] = Target{Worker: uint64(i + 1)}
	}
	return list
}

// selectOf is Select among targets.
func (s *Scheduler) selectOf(now time.Time, r *Request, among []Target, bound int, p Policy, sel *Selection) (int, *Lease) {
	return s.Select(now, r, s.Refs(among...), bound, p, sel)
}

// explainOf is Explain among targets.
func (s *Scheduler) explainOf(now time.Time, r *Request, among []Target, bound int, p Policy, sel *Selection) Explanation {
	return s.Explain(now, r, s.Refs(among...), bound, p, sel)
}

// declared returns a scheduler with so many idle targets that it knows.
func declared(n int) (*Scheduler, []Target) {
	s, ts := NewScheduler(Settings{}), targets(n)
	for _, t := range ts {
		s.Declare(t, 0)
	}
	return s, ts
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

func prompt(blocks ...uint64) *Request {
	return &Request{Prompt: cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: int64(len(blocks)) * 16}, Streamed: true}
}

func upTo(n uint64) []uint64 {
	blocks := make([]uint64, n)
	for i := range blocks {
		blocks[i] = uint64(i) + 1
	}
	return blocks
}

// idle fails the test unless nothing at all is booked.
func idle(t *testing.T, s *Scheduler, ts []Target, at time.Time) {
	t.Helper()
	if n := s.Stats().Leases; n != 0 {
		t.Errorf("%d leases are left", n)
	}
	for _, target := range ts {
		if l, _ := s.Load(at, target); l.Requests != 0 || l.PrefillTokens != 0 || l.PromptBlocks != 0 || l.OutputBlocks != 0 {
			t.Errorf("the load of %s is not zero: %+v", target, l)
		}
	}
}

func TestPrefillIsBookedUntilTheFirstToken(t *testing.T) {
	s, ts := declared(1)
	sel := &Selection{Rand: seeded(1)}
	_, l := s.selectOf(epoch, prompt(upTo(10)...), ts, -1, NewDynamo(), sel)
	if load, _ := s.Load(epoch, ts[0]); load.PrefillTokens != 160 || load.Requests != 1 || load.PromptBlocks != 10 {
		t.Errorf("after booking: %+v", load)
	}
	// a prompt that extends the first one shares its blocks, in flight as they are
	_, l2 := s.selectOf(epoch, prompt(upTo(12)...), ts, -1, NewDynamo(), sel)
	if load, _ := s.Load(epoch, ts[0]); load.PrefillTokens != 160+32 || load.PromptBlocks != 12 {
		t.Errorf("after booking the second: %+v", load)
	}
	l.FirstToken(epoch.Add(time.Second))
	l.Output(epoch.Add(time.Second), 1)
	l.Output(epoch.Add(time.Second), 16)
	l.Output(epoch.Add(time.Second), 17)
	if load, _ := s.Load(epoch, ts[0]); load.PrefillTokens != 32 || load.OutputBlocks != 2 {
		t.Errorf("after the first token: %+v", load)
	}
	if !l.End(true, nil) || l.End(true, nil) {
		t.Error("a lease must end exactly once")
	}
	l.Output(epoch, 1000)
	l.FirstToken(epoch)
	l2.End(false, nil)
	idle(t, s, ts, epoch)
	if load, _ := s.Load(epoch, ts[0]); load.CachedTokens != 160 {
		t.Errorf("the cache model holds %d tokens, want the 160 that were computed", load.CachedTokens)
	}
}

func TestUnseenPrefillEndsWhenPredicted(t *testing.T) {
	s, ts := declared(1)
	r := prompt(upTo(1000)...)
	r.Streamed = false
	sel := &Selection{Rand: seeded(1)}
	_, l := s.selectOf(epoch, r, ts, -1, NewDynamo(), sel)
	due := time.Duration(sel.Candidates[0].PrefillTime * float64(time.Millisecond))
	if load, _ := s.Load(epoch.Add(due-time.Millisecond), ts[0]); load.PrefillTokens != 16000 {
		t.Errorf("before it is due: %+v", load)
	}
	if load, _ := s.Load(epoch.Add(due), ts[0]); load.PrefillTokens != 0 {
		t.Errorf("after it was due: %+v", load)
	}
	l.End(true, nil)
	idle(t, s, ts, epoch)
}

func TestAnswerIsPartOfTheNextTurn(t *testing.T) {
	s, ts := declared(4)
	sel := &Selection{Rand: seeded(3)}
	i, l := s.selectOf(epoch, prompt(upTo(5)...), ts, -1, NewDynamo(), sel)
	l.End(true, upTo(9))
	j, l := s.selectOf(epoch, prompt(upTo(11)...), ts, -1, NewDynamo(), sel)
	if i != j || sel.Candidates[j].OverlapBlocks != 9 {
		t.Errorf("turn 2 went to %d with %v blocks, want %d with 9", j, sel.Candidates[j].OverlapBlocks, i)
	}
	l.End(true, nil)
	s.Clear(ts[i])
	_, l = s.selectOf(epoch, prompt(upTo(11)...), ts, i, nil, sel)
	if sel.Candidates[i].OverlapBlocks != 0 {
		t.Error("a cleared target still holds blocks")
	}
	l.End(false, nil)
}

func TestLeaseFromBeforeARestartLeavesNothing(t *testing.T) {
	for _, computed := range []bool{false, true} {
		s, ts := declared(2)
		sel := &Selection{}
		_, l := s.selectOf(epoch, prompt(9, 8), ts, 0, nil, sel)
		l.End(true, nil)
		_, l = s.selectOf(epoch, prompt(upTo(5)...), ts, 0, nil, sel)
		l.Output(epoch, 100)
		for range 2 {
			s.Clear(ts[0])
			if load, _ := s.Load(epoch, ts[0]); load.PromptBlocks != 5 || load.CachedTokens != 0 {
				t.Errorf("after the restart: %+v", load)
			}
		}
		_, again := s.selectOf(epoch, prompt(upTo(7)...), ts, 0, nil, sel)
		if sel.Candidates[0].OverlapBlocks != 0 || sel.Candidates[0].PromptBlocks != 5 {
			t.Errorf("the restarted target is offered with %+v", sel.Candidates[0])
		}
		l.End(computed, upTo(9))
		if load, _ := s.Load(epoch, ts[0]); load.CachedTokens != 7*16 || load.PromptBlocks != 7 {
			t.Errorf("after the end of what was before the restart: %+v", load)
		}
		again.End(true, nil)
		idle(t, s, ts, epoch)
		if s.Stats().IndexBlocks != 7 {
			t.Errorf("%d blocks are left", s.Stats().IndexBlocks)
		}
		s.Declare(ts[1], 0)
		if load, _ := s.Load(epoch, ts[1]); load.CachedTokens != 0 || s.targets[ts[1]].slot == s.targets[ts[0]].slot {
			t.Errorf("the next target has what the restarted one had: %+v", load)
		}
	}
}

func TestRetire(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(4)
	for _, target := range ts {
		s.Declare(target, 1600)
	}
	known := func(i int) bool {
		_, ok := s.Load(epoch, ts[i])
		return ok
	}
	s.Retire(ts[0])
	if known(0) {
		t.Error("a target without leases is still known")
	}
	_, l1 := s.selectOf(epoch, prompt(1), ts, 1, nil, &Selection{})
	_, l2 := s.selectOf(epoch, prompt(1), ts, 1, nil, &Selection{})
	_, l3 := s.selectOf(epoch, prompt(1), ts, 2, nil, &Selection{})
	s.Retire(ts[1])
	s.Retire(ts[2])
	s.Declare(ts[2], 3200) // it is back
	l3.End(true, nil)
	if l1.End(true, nil); !known(1) || !known(2) {
		t.Error("a target with a lease, or one that is back, is forgotten")
	}
	if l2.End(true, nil); known(1) {
		t.Error("a retired target outlives its last lease")
	}
	// a concurrent request may still book it; the end of that removes it again
	_, l := s.selectOf(epoch, prompt(1), ts, 0, nil, &Selection{})
	if !known(0) {
		t.Error("a lease without a load")
	}
	if l.End(true, nil); known(0) {
		t.Error("a retired target that was booked again is still known")
	}
	// neither does being offered make one known
	_, l = s.selectOf(epoch, prompt(1), ts, 3, nil, &Selection{})
	if l.End(true, nil); known(0) || known(1) {
		t.Error("a retired target is known after it was offered")
	}
}

func TestLeakedLeaseExpires(t *testing.T) {
	s, ts := NewScheduler(Settings{LeaseExpiry: time.Minute}), targets(1)
	sel := &Selection{}
	_, leaked := s.selectOf(epoch, prompt(upTo(5)...), ts, 0, nil, sel)
	_, alive := s.selectOf(epoch, prompt(upTo(6)...), ts, 0, nil, sel)
	alive.Output(epoch.Add(30*time.Second), 1)
	s.mu.Lock() // which a sign of life does not need
	alive.Alive(epoch.Add(59 * time.Second))
	s.mu.Unlock()
	if n := s.Expire(epoch.Add(61 * time.Second)); n != 1 {
		t.Errorf("%d leases expired, want 1", n)
	}
	if s.Stats().Expired != 1 || s.Stats().Leases != 1 {
		t.Errorf("stats: %+v", s.Stats())
	}
	if leaked.End(true, nil) {
		t.Error("an expired lease ended again")
	}
	alive.End(true, nil)
	idle(t, s, ts, epoch)
}

// Whatever happens to leases, in whatever order, the loads come back to zero.
func TestLoadsComeBackToZero(t *testing.T) {
	s, ts := NewScheduler(Settings{Memory: 1 << 20, LeaseExpiry: time.Hour}), targets(5)
	for _, target := range ts {
		s.Declare(target, 2000)
	}
	rnd, at := seeded(7), epoch
	policies := []Policy{
		NewDynamo(), &RoundRobin{}, &LeastLoad{}, NewPredictedLatency(), new(PrefixHash),
		Random{},
		PowerOfTwo{},
		&Dynamo{PrefillLoadScale: 1, Temperature: 0.5, TrackPrefillTokens: true, TrackActiveBlocks: true, TrackOutputBlocks: true},
	}
	var live []*Lease
	sel := &Selection{Rand: seeded(8)} // not rnd: the events must not depend on the policies
	for step := range 20_000 {
		at = at.Add(time.Duration(rnd.IntN(1000)) * time.Millisecond)
		switch op := rnd.IntN(10); {
		case op < 4:
			r := prompt(upTo(uint64(rnd.IntN(60)))...)
			for i := range r.Blocks {
				r.Blocks[i] += uint64(i/7) * uint64(rnd.IntN(3)) * 1000
			}
			if rnd.IntN(50) == 0 { // more than the cache model takes
				r.Blocks = distinct(rnd.Uint64(), 200)
			}
			r.ExpectedTokens, r.BoundTarget = rnd.Int64N(2)*rnd.Int64N(500), ts[rnd.IntN(5)]
			r.Streamed, r.BlockTokens = rnd.IntN(2) == 0, 10+10*rnd.Float64()
			_, l := s.selectOf(at, r, ts, rnd.IntN(7)*rnd.IntN(2)%5-1, policies[step%len(policies)], sel)
			live = append(live, l)
		case len(live) == 0:
		case op < 6:
			if l := live[rnd.IntN(len(live))]; rnd.IntN(3) > 0 {
				l.FirstToken(at)
			} else if rnd.IntN(2) == 0 {
				l.Prefilled(at)
			} else {
				l.Answered(at, rnd.Int64N(100)-1)
			}
		case op < 7:
			live[rnd.IntN(len(live))].Output(at, int64(rnd.IntN(500)))
		case op < 9:
			n := rnd.IntN(len(live))
			if rnd.IntN(2) == 0 {
				live[n].Counted(Counts{Prompt: rnd.Int64N(1000), Cached: rnd.Int64N(1000), CachedReported: true, Answer: rnd.Int64N(2000)})
			}
			live[n].End(rnd.IntN(2) == 0, upTo(uint64(rnd.IntN(80))))
			if rnd.IntN(4) > 0 { // else it will be ended again
				live = slices.Delete(live, n, n+1)
			}
		default:
			target := ts[rnd.IntN(5)]
			switch rnd.IntN(100) {
			case 0, 1:
				s.Clear(target)
			case 2:
				s.Retire(target)
			case 3, 4:
				s.Declare(target, 1000+int64(rnd.IntN(2000)))
			case 5:
				s.Apply(Settings{Memory: int64(1+rnd.IntN(16)) << 16, LeaseExpiry: time.Hour})
			case 6:
				s.Caches().Step(rnd.IntN(500))
			}
		}
	}
	if s.Stats().Untracked == 0 {
		t.Error("everything was tracked")
	}
	if samples(s) == 0 {
		t.Error("no times are learned")
	}
	sound(t, s.latency)
	for _, l := range live {
		l.End(true, nil)
	}
	idle(t, s, ts, at)
	for _, b := range s.targets {
		q := &b.awaiting
		if b.unshared != 0 || b.untracked != 0 || b.faded != 0 || len(b.due) != 0 ||
			len(q.leases) != 0 || q.work != (work{}) || b.timing != nil {
			t.Errorf("the load of %s is not zero: %+v", b.target, b)
		}
	}
	for _, target := range ts {
		if !s.Forget(target) {
			t.Errorf("%s cannot be forgotten", target)
		}
	}
	if s.Expire(at); s.Stats().IndexBlocks != 0 {
		t.Errorf("%d blocks are left of targets that were forgotten", s.Stats().IndexBlocks)
	}
}

func TestConcurrentLeases(t *testing.T) {
	s, ts := declared(3)
	p := NewDynamo()
	done := make(chan struct{})
	for g := range 8 {
		go func() {
			defer func() { done <- struct{}{} }()
			sel, rnd := &Selection{}, seeded(uint64(g))
			sel.Rand = rnd
			for i := range 500 {
				at := epoch.Add(time.Duration(i) * time.Millisecond)
				_, l := s.selectOf(at, prompt(upTo(uint64(rnd.IntN(40)))...), ts, -1, p, sel)
				l.FirstToken(at)
				l.Output(at, 40)
				go l.End(true, nil)
				l.End(true, nil)
				if i%100 == 0 {
					s.Clear(ts[g%3])
				}
			}
		}()
	}
	for range 8 {
		<-done
	}
	idle(t, s, ts, epoch.Add(time.Hour))
}
