package batch

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestSlotKeepsWhatItsRequestsComputed has the turns of one session, one of which is
// aborted.
func TestSlotKeepsWhatItsRequestsComputed(t *testing.T) {
	b, c := newBatcher(t, 64, 4, 100, 16)
	var slot Slot
	context := tokens(0, 0)
	turn := func(id uint64, n, answer int) *Request {
		r := request(id, slices.Concat(context, tokens(uint32(id)*1000, n)), answer, 16)
		r.Slot = &slot
		submit(t, b, r)
		return r
	}
	for i, want := range []struct{ new, cached, held, blocks int }{{40, 0, 45, 3}, {10, 45, 60, 4}, {1, 60, 66, 5}} {
		r := turn(uint64(i), want.new, 5)
		if got := admitted(drain(b, 0)); got[uint64(i)] != want.cached || slot.Held() != want.held || slot.Blocks() != want.blocks {
			t.Errorf("turn %d: %d cached, %d held in %d blocks, want %+v", i, got[uint64(i)], slot.Held(), slot.Blocks(), want)
		}
		context = slices.Concat(r.Prompt.Tokens, r.Answer)
	}
	if n := c.Counts(); n.Used != 5 || c.Hit(request(9, context, 1, 16).Prompt) != 32 {
		t.Errorf("%+v, and others find %d tokens", n, c.Hit(request(9, context, 1, 16).Prompt))
	}
	turn(7, 5, 50)
	b.Step(0)
	b.Step(0)
	if !b.Abort(7) || slot.Held() != 0 || c.Counts().Used != 0 {
		t.Errorf("an aborted turn leaves %d tokens, %+v", slot.Held(), c.Counts())
	}
	turn(8, 5, 5)
	if got := admitted(drain(b, 0)); got[8] != 32 || slot.Held() != 76 {
		t.Errorf("behind it %d are cached, and %d held", got[8], slot.Held())
	}
	turn(9, 1<<10, 1)
	if b.Waiting() != 1 || !b.Abort(9) || slot.Held() != 76 {
		t.Errorf("a turn that never ran leaves %d tokens", slot.Held())
	}
	slot.Release()
	slot.Release()
	if n := c.Counts(); n.Used != 0 || slot.Blocks() != 0 {
		t.Errorf("released: %+v", n)
	}
}

// TestSlotsAndRequestsShareTheCache runs sessions and other requests at random. Blocks
// are never lost, and a turn has all that the turns before it have computed.
func TestSlotsAndRequestsShareTheCache(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	b, c := newBatcher(t, 64, 8, 64, 16)
	type session struct {
		slot    Slot
		context []uint32
		turn    *Request
	}
	sessions := make([]session, 4)
	for id := uint64(1); id < 4000; id++ {
		s := &sessions[rng.IntN(len(sessions))]
		switch n := 1 + rng.IntN(60); {
		case rng.IntN(3) == 0:
			_ = b.Submit(request(id, tokens(uint32(rng.IntN(3))*1000, n), 1+rng.IntN(20), 16))
		case s.turn == nil && rng.IntN(8) == 0:
			s.slot.Release()
			s.context = nil
		case s.turn == nil:
			r := request(id, slices.Concat(s.context, tokens(uint32(id)*1000, n)), 1+rng.IntN(20), 16)
			if r.Slot = &s.slot; b.Submit(r) == nil {
				s.turn = r
			}
		case rng.IntN(4) == 0:
			b.Abort(s.turn.ID)
			s.turn = nil
		}
		for _, e := range b.Step(0) {
			for i := range sessions {
				s := &sessions[i]
				if e.Request != s.turn {
					continue
				}
				if e.Kind == Admitted && s.slot.Held() > 0 && e.Cached != s.slot.Held() {
					t.Fatalf("%d of %d tokens", e.Cached, s.slot.Held())
				}
				if e.Last {
					s.context, s.turn = slices.Concat(s.turn.Prompt.Tokens, s.turn.Answer), nil
					if s.slot.Held() != len(s.context) {
						t.Fatalf("%d tokens held of %d", s.slot.Held(), len(s.context))
					}
				}
			}
		}
		if n := c.Counts(); n.Empty+n.Used+n.Cached != c.Blocks() {
			t.Fatalf("%+v of %d blocks", n, c.Blocks())
		}
		if rng.IntN(50) == 0 { // sessions may wait for each other for ever
			for i := range sessions {
				if s := &sessions[i]; s.turn != nil {
					b.Abort(s.turn.ID)
				}
				sessions[i].slot.Release()
				sessions[i] = session{}
			}
		}
	}
	for i := range sessions {
		if s := &sessions[i]; s.turn != nil {
			b.Abort(s.turn.ID)
		}
		sessions[i].slot.Release()
	}
	drain(b, 0)
	if n := c.Counts(); n.Used != 0 {
		t.Errorf("%+v at the end", n)
	}
}
