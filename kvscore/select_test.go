package kvscore

import (
	"math/rand/v2"
	"testing"
)

// choose is a policy made of a function.
type choose func(*Selection) int

func (c choose) Choose(s *Selection) int { return c(s) }

// distinct returns blocks that no other seed has.
func distinct(seed uint64, n int) []uint64 {
	rnd := rand.New(rand.NewPCG(seed, 77))
	blocks := make([]uint64, n)
	for i := range blocks {
		blocks[i] = rnd.Uint64()
	}
	return blocks
}

func TestPolicyThatPanics(t *testing.T) {
	s, ts := NewScheduler(Settings{}), targets(2)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic is gone")
			}
		}()
		s.selectOf(epoch, prompt(1), ts, -1, choose(func(*Selection) int { panic("policy") }), &Selection{})
	}()
	if !s.mu.TryLock() {
		t.Fatal("the lock is held for ever")
	}
	s.mu.Unlock()
	idle(t, s, ts, epoch)
}

func TestSelectAmongNone(t *testing.T) {
	if i, l := NewScheduler(Settings{}).selectOf(epoch, prompt(1), nil, 0, NewDynamo(), &Selection{}); i != -1 || l != nil {
		t.Errorf("chose %d", i)
	}
	if e := NewScheduler(Settings{}).explainOf(epoch, prompt(1), nil, 0, NewDynamo(), &Selection{}); e.Chosen != -1 || e.Preferred != -1 {
		t.Errorf("explained %+v", e)
	}
}

// The cache model tracks no more than its capacity, the load all that is booked.
func TestActiveBlocksBeyondTheCapacity(t *testing.T) {
	s, ts := declared(1)
	s.Declare(ts[0], 16_000) // 1000 blocks
	sel := &Selection{}
	var live []*Lease
	for i := range uint64(10) {
		_, l := s.selectOf(epoch, prompt(distinct(i, 500)...), ts, 0, nil, sel)
		live = append(live, l)
	}
	if load, _ := s.Load(epoch, ts[0]); load.PromptBlocks != 5000 || s.Stats().Untracked != 8 {
		t.Errorf("%v blocks are booked, want 5000; %d leases are not tracked, want 8", load.PromptBlocks, s.Stats().Untracked)
	}
	_, l := s.selectOf(epoch, prompt(), ts, 0, nil, sel)
	if sel.Candidates[0].PromptBlocks != 5000 {
		t.Errorf("the candidate has %v blocks", sel.Candidates[0].PromptBlocks)
	}
	l.End(false, nil)
	for i, l := range live {
		l.End(i%2 == 0, nil)
		if load, _ := s.Load(epoch, ts[0]); load.PromptBlocks != float64(4500-500*i) {
			t.Errorf("%v blocks are booked after %d ends", load.PromptBlocks, i+1)
		}
	}
	idle(t, s, ts, epoch)
}
