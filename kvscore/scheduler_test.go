package kvscore

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var epoch = time.Unix(1_700_000_000, 0)

func targets(n int) []Target {
	list := make([]Target, n)
	for i := range list {
		list[i] = Target{Worker: uint64(i + 1)}
	}
	return list
}

func seeded(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

func prompt(blocks ...uint64) *Request {
	return &Request{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: int64(len(blocks)) * 16, Streamed: true}
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
			t.Errorf("the books of %s are not at zero: %+v", target, l)
		}
	}
}

func TestPrefillIsBookedUntilTheFirstToken(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(1)
	sel := &Selection{Rand: seeded(1)}
	_, l := s.Select(epoch, prompt(upTo(10)...), ts, -1, NewDynamo(), sel)
	if load, _ := s.Load(epoch, ts[0]); load.PrefillTokens != 160 || load.Requests != 1 || load.PromptBlocks != 10 {
		t.Errorf("after booking: %+v", load)
	}
	// a prompt that extends the first one shares its blocks, in flight as they are
	_, l2 := s.Select(epoch, prompt(upTo(12)...), ts, -1, NewDynamo(), sel)
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
		t.Errorf("the mirror holds %d tokens, want the 160 that were computed", load.CachedTokens)
	}
}

func TestUnseenPrefillEndsWhenPredicted(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(1)
	r := prompt(upTo(1000)...) // 16,000 tokens at 8,000 a second
	r.Streamed = false
	_, l := s.Select(epoch, r, ts, -1, NewDynamo(), &Selection{Rand: seeded(1)})
	if load, _ := s.Load(epoch.Add(1999*time.Millisecond), ts[0]); load.PrefillTokens != 16000 {
		t.Errorf("before it is due: %+v", load)
	}
	if load, _ := s.Load(epoch.Add(2*time.Second), ts[0]); load.PrefillTokens != 0 {
		t.Errorf("after it was due: %+v", load)
	}
	l.End(true, nil)
	idle(t, s, ts, epoch)
}

func TestPrefillRateIsLearned(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(2)
	sel := &Selection{Rand: seeded(1)}
	_, l := s.Select(epoch, prompt(upTo(100)...), ts, 0, nil, sel)
	l.FirstToken(epoch.Add(100 * time.Millisecond)) // 16,000 a second
	l.End(true, nil)
	r := prompt(1001, 1002)
	r.Tokens, r.Streamed = 1600, false
	_, l = s.Select(epoch, r, ts, 1, nil, sel) // the other target has the pool's rate
	if load, _ := s.Load(epoch.Add(101*time.Millisecond), ts[1]); load.PrefillTokens != 0 {
		t.Errorf("prefill is still booked after its time: %+v", load)
	}
	l.End(true, nil)
}

func TestAnswerIsPartOfTheNextTurn(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(4)
	sel := &Selection{Rand: seeded(3)}
	i, l := s.Select(epoch, prompt(upTo(5)...), ts, -1, NewDynamo(), sel)
	l.End(true, upTo(9))
	j, l := s.Select(epoch, prompt(upTo(11)...), ts, -1, NewDynamo(), sel)
	if i != j || sel.Candidates[j].OverlapBlocks != 9 {
		t.Errorf("turn 2 went to %d with %v blocks, want %d with 9", j, sel.Candidates[j].OverlapBlocks, i)
	}
	l.End(true, nil)
	s.Clear(ts[i])
	_, l = s.Select(epoch, prompt(upTo(11)...), ts, i, nil, sel)
	if sel.Candidates[i].OverlapBlocks != 0 {
		t.Error("a cleared target still holds blocks")
	}
	l.End(false, nil)
}

func TestLeaseFromBeforeARestartLeavesNothing(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(1)
	_, l := s.Select(epoch, prompt(upTo(5)...), ts, 0, nil, &Selection{})
	s.Clear(ts[0])
	l.End(true, upTo(9))
	if load, _ := s.Load(epoch, ts[0]); load.CachedTokens != 0 {
		t.Errorf("the restarted target holds %d tokens", load.CachedTokens)
	}
	idle(t, s, ts, epoch)
}

func TestLeakedLeaseExpires(t *testing.T) {
	s, ts := NewScheduler(Settings{LeaseExpiry: time.Minute}), targets(1)
	sel := &Selection{}
	_, leaked := s.Select(epoch, prompt(upTo(5)...), ts, 0, nil, sel)
	_, alive := s.Select(epoch, prompt(upTo(6)...), ts, 0, nil, sel)
	alive.Output(epoch.Add(59*time.Second), 1)
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

// Conversations that begin with one common stem must not pile up where it
// happened to be first, and stay at home once they have a history.
func TestStemsSpread(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(4)
	p, sel := NewDynamo(), &Selection{Rand: seeded(5)}
	stem := upTo(100)
	served := make([]int, len(ts))
	home := make([]int, 40)
	for c := range home {
		blocks := append(slices.Clone(stem), uint64(1000+10*c), uint64(1001+10*c))
		i, l := s.Select(epoch, prompt(blocks...), ts, -1, p, sel)
		l.End(true, nil)
		home[c] = i
		served[i]++
	}
	for c := range home {
		blocks := append(slices.Clone(stem), uint64(1000+10*c), uint64(1001+10*c), uint64(1002+10*c))
		i, l := s.Select(epoch, prompt(blocks...), ts, -1, p, sel)
		l.End(true, nil)
		if i != home[c] {
			t.Errorf("turn 2 of conversation %d went to %d, want %d", c, i, home[c])
		}
	}
	if slices.Max(served) > 16 {
		t.Errorf("conversations by target: %v", served)
	}
}

// Whatever happens to leases, in whatever order, the books come back to zero.
func TestBooksComeBackToZero(t *testing.T) {
	s, ts := NewScheduler(Settings{Memory: 1 << 20, LeaseExpiry: time.Hour}), targets(5)
	for _, target := range ts {
		s.Declare(target, 2000)
	}
	rnd, at := seeded(7), epoch
	policies := []Policy{NewDynamo(), &RoundRobin{}, &LeastLoad{}, &Dynamo{PrefillLoadScale: 1, Temperature: 0.5, NoKVReuse: true}}
	var live []*Lease
	sel := &Selection{Rand: rnd}
	for range 20_000 {
		at = at.Add(time.Duration(rnd.IntN(1000)) * time.Millisecond)
		switch op := rnd.IntN(10); {
		case op < 4:
			r := prompt(upTo(uint64(rnd.IntN(60)))...)
			for i := range r.Blocks {
				r.Blocks[i] += uint64(i/7) * uint64(rnd.IntN(3)) * 1000
			}
			r.Streamed, r.BlockTokens = rnd.IntN(2) == 0, 10+10*rnd.Float64()
			_, l := s.Select(at, r, ts, rnd.IntN(7)*rnd.IntN(2)%5-1, policies[rnd.IntN(4)], sel)
			live = append(live, l)
		case len(live) == 0:
		case op < 6:
			live[rnd.IntN(len(live))].FirstToken(at)
		case op < 7:
			live[rnd.IntN(len(live))].Output(at, int64(rnd.IntN(500)))
		case op < 9:
			i := rnd.IntN(len(live))
			live[i].End(rnd.IntN(2) == 0, upTo(uint64(rnd.IntN(80))))
			if rnd.IntN(4) > 0 { // else it will be ended again
				live = slices.Delete(live, i, i+1)
			}
		case rnd.IntN(50) == 0:
			s.Clear(ts[rnd.IntN(5)])
		}
	}
	for _, l := range live {
		l.End(true, nil)
	}
	idle(t, s, ts, at)
	for _, target := range ts {
		if !s.Forget(target) {
			t.Errorf("%s cannot be forgotten", target)
		}
	}
}

func TestConcurrentLeases(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(3)
	p := NewDynamo()
	done := make(chan struct{})
	for g := range 8 {
		go func() {
			defer func() { done <- struct{}{} }()
			sel, rnd := &Selection{}, seeded(uint64(g))
			sel.Rand = rnd
			for i := range 500 {
				at := epoch.Add(time.Duration(i) * time.Millisecond)
				_, l := s.Select(at, prompt(upTo(uint64(rnd.IntN(40)))...), ts, -1, p, sel)
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

func BenchmarkSelect(b *testing.B) {
	for _, n := range []uint64{16, 256, 4096} {
		b.Run(map[uint64]string{16: "1KB", 256: "16KB", 4096: "256KB"}[n], func(b *testing.B) {
			s, ts := NewScheduler(Settings{}), targets(8)
			p, sel := NewDynamo(), &Selection{Rand: seeded(1)}
			r := prompt(upTo(n)...)
			b.ReportAllocs()
			for b.Loop() {
				_, l := s.Select(epoch, r, ts, -1, p, sel)
				l.End(true, nil)
			}
		})
	}
}
