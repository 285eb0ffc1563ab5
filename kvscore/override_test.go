package kvscore

import (
	"math"
	"testing"
	"time"
)

// TestFactorsSteer has idle targets of which a factor makes one cheaper: it gets
// all that comes.
func TestFactorsSteer(t *testing.T) {
	s := NewScheduler(Settings{})
	r := prompt(upTo(4)...)
	r.Factors = []float64{1, math.Exp(-math.Tanh(1)), 0}
	var sel Selection
	sel.Rand = seeded(1)
	for range 20 {
		i, lease := s.Select(time.Now(), r, targets(3), -1, NewDynamo(), &sel)
		lease.End(false, nil)
		if i != 1 {
			t.Fatalf("chose %d, costs %v %v %v", i, sel.Candidates[0].Cost, sel.Candidates[1].Cost, sel.Candidates[2].Cost)
		}
	}
	a, b, c := sel.Candidates[0].Cost, sel.Candidates[1].Cost, sel.Candidates[2].Cost
	if a == 0 || math.Abs(b/a-math.Exp(-math.Tanh(1))) > 1e-9 || c != a {
		t.Errorf("costs %v, %v, %v", a, b, c)
	}
}

// TestOutputFadesTowardsItsEnd has an answer whose length is expected: its
// blocks count less and less, and the loads come back to zero.
func TestOutputFadesTowardsItsEnd(t *testing.T) {
	s := NewScheduler(Settings{})
	ts := targets(1)
	t0 := time.Now()
	r := prompt(upTo(2)...)
	r.Tokens, r.Streamed, r.ExpectedTokens = 32, true, 320
	sel, look := Selection{Rand: seeded(1)}, Selection{Rand: seeded(1)}
	_, lease := s.Select(t0, r, ts, -1, new(LeastLoad), &sel)
	output := func() float64 {
		s.Explain(t0, prompt(9), ts, -1, new(LeastLoad), &look)
		return look.Candidates[0].OutputBlocks
	}
	for _, v := range []struct {
		tokens int64
		want   float64
	}{{16, 0.95}, {160, 5}, {304, 19 * 0.05}, {320, 0}, {640, 0}} {
		lease.Output(t0, v.tokens)
		if got := output(); math.Abs(got-v.want) > 1e-9 {
			t.Errorf("after %d tokens: %v blocks, want %v", v.tokens, got, v.want)
		}
	}
	if l, _ := s.Load(t0, ts[0]); l.OutputBlocks != 40 {
		t.Errorf("the load shows %d blocks, want 40", l.OutputBlocks)
	}
	lease.End(true, nil)
	if got := output(); got != 0 {
		t.Errorf("%v blocks are left", got)
	}
}
