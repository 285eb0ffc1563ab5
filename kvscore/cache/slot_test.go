package cache

import (
	"testing"
	"time"
)

// TestLargeCachesGoInSteps has a target lose a large cache, and another one with such a cache leave. Nobody
// waits for all of that work, and a new target has nothing of it.
func TestLargeCachesGoInSteps(t *testing.T) {
	c := New(64<<20, 16)
	now := time.Unix(1000, 0)
	fill := func(s *Slot) *Slot {
		for i := range uint64(3000) {
			p := Prompt{Root: i, Blocks: []uint64{i, i + 1}, BlockTokens: 16, Tokens: 32, Weights: Same(16_000)}
			var v View
			c.Look(now, &p, &v)
			var ticket Ticket
			c.Book(now, &ticket, s, &p, &v)
			v.Drop()
			ticket.End(time.Time{}, true, nil, Counts{})
		}
		return s
	}
	first, second := fill(c.Open(Target{Worker: 1}, 1_000_000)), fill(c.Open(Target{Worker: 2}, 1_000_000))
	if first.Lose(); first.Used() != 0 || second.Used() != 96_000 {
		t.Errorf("%d and %d tokens after the first one lost its cache", first.Used(), second.Used())
	}
	second.Close()
	if second.Used() == 0 {
		t.Error("all of a closed slot was freed at once")
	}
	if third := c.Open(Target{Worker: 3}, 1_000_000); third.Used() != 0 || third.number == second.number {
		t.Errorf("a new slot holds %d tokens", third.Used())
	}
	for c.Step(1000) {
	}
	if fourth := c.Open(Target{Worker: 4}, 1_000_000); fourth.number != second.number || second.Used() != 0 || c.Size().IndexBlocks != 0 {
		t.Errorf("%d tokens are left of a closed slot", second.Used())
	}
}
