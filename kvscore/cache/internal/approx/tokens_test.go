package approx

import (
	"math/rand/v2"
	"testing"
)

// send records a prompt that a slot has computed, of which the engine counted the
// tokens.
func send(x *Index, slot int, c *Chain, tokens int64) {
	ref, n := x.acquireAll(slot, c)
	if n == len(c.Blocks) {
		x.RecordCount(ref, c, tokens)
	}
	x.Release(ref, true)
}

// even returns weights of text of which all kinds have so many milli-tokens.
func even(milliTokens int32) Weights {
	w := Weights{Kinds: new([Kinds]int32)}
	for k := range w.Kinds {
		w.Kinds[k] = milliTokens
	}
	return w
}

func blocksFrom(first, n uint64) (out []uint64) {
	for i := range n {
		out = append(out, (first+i)<<5)
	}
	return out
}

func TestCountsOfEnginesCountForLaterTurns(t *testing.T) {
	x := New(1 << 20)
	x.SetCapacity(0, 100_000)
	x.SetCapacity(1, 100_000)
	all := blocksFrom(1, 30)
	first := Chain{Blocks: all[:10], Past: 0.5, Weights: even(16_000)}
	send(x, 0, &first, 210) // 20 a block
	var m Match
	for _, c := range []struct {
		name   string
		chain  Chain
		tokens int64
		known  float64
	}{
		{"the next turn", Chain{Blocks: all}, 210_000, 10.5},
		{"the same prompt", first, 210_000, 10.5},
		{"one that ends before", Chain{Blocks: all[:10], Past: 0.25}, 200_000, 10},
		{"one that goes on differently", Chain{Blocks: append(blocksFrom(1, 4), 999)}, 80_000, 4},
	} {
		x.Match(&c.chain, &m)
		if m.Tokens[0] != c.tokens || m.KnownTokens != c.tokens || m.Known != c.known || m.Tokens[1] != 0 {
			t.Errorf("%s: %d tokens, known %v blocks of %d, want %d, %v", c.name, m.Tokens[0], m.Known, m.KnownTokens, c.tokens, c.known)
		}
	}
	// What is added has the difference, and its own count.
	send(x, 1, &Chain{Blocks: all[:20], Past: 0.5, Weights: even(16_000)}, 310) // 10 a block
	x.Match(&Chain{Blocks: all}, &m)
	if m.Tokens[0] != 210_000 || m.Tokens[1] != 310_000 || m.Known != 20.5 {
		t.Errorf("%d and %d tokens, known %v", m.Tokens[0], m.Tokens[1], m.Known)
	}
	x.Match(&Chain{Blocks: append(blocksFrom(1, 15), 999)}, &m)
	if got := m.Tokens[1]; got < 255_000-10_000 || got > 255_000+10_000 {
		t.Errorf("%d tokens in 15 blocks", got)
	}
	if used := x.Used(1); used < 300 || used > 310 {
		t.Errorf("slot 1 holds %d tokens", used)
	}
	for _, tokens := range []int64{0, -1, 1 << 40} {
		send(x, 0, &Chain{Blocks: all[:25]}, tokens)
	}
	x.Match(&Chain{Blocks: all[:12]}, &m)
	if m.Tokens[0] < 210_000 || m.Tokens[0] > 235_000 {
		t.Errorf("after counts that cannot be: %d", m.Tokens[0])
	}
	x.check(t)
}

// A prompt of two kinds of text is divided by them where another one leaves it.
func TestTokensAreDividedByKind(t *testing.T) {
	x := New(1 << 20)
	x.SetCapacity(0, 100_000)
	w := Weights{Kinds: new([Kinds]int32)}
	w.Kinds[1], w.Kinds[2] = 10_000, 30_000
	var c Chain
	for i := range uint64(20) {
		c.Blocks = append(c.Blocks, i<<5|1+i/10)
	}
	c.Weights = w
	send(x, 0, &c, 800) // twice as many as the kinds have
	var m Match
	for range 2 {
		for n, want := range map[int]int64{5: 100_000, 10: 200_000, 15: 500_000, 20: 800_000} {
			x.Match(&Chain{Blocks: append(append([]uint64{}, c.Blocks[:n]...), 77<<5), Weights: w}, &m)
			if d := m.Tokens[0] - want; d < -100 || d > 100 {
				t.Errorf("%d blocks: %d tokens, want %d", n, m.Tokens[0], want)
			}
		}
		other := append(append([]uint64{}, c.Blocks[:10]...), 88<<5|1)
		send(x, 0, &Chain{Blocks: other, Weights: w}, 0) // which splits it
	}
	x.check(t)
}

// Prompts fork where no engine counts. What it had cached of the second one is the
// count there; others change it no more than that of their own part.
func TestCachedTokensCountWherePromptsFork(t *testing.T) {
	x := New(1 << 20)
	x.SetCapacity(0, 1_000_000)
	w := even(16_000)
	fork := func(tail uint64) *Chain {
		return &Chain{Blocks: append(blocksFrom(1, 100), blocksFrom(1000*tail, 50)...), Weights: w}
	}
	stem := func() int64 {
		var m Match
		x.Match(&Chain{Blocks: append(blocksFrom(1, 100), 7), Weights: w}, &m)
		return m.Tokens[0] / 1000
	}
	send(x, 0, fork(1), 3000) // in fact 10 a block and 40 a block
	if got := stem(); got != 2000 {
		t.Errorf("%d tokens in 100 blocks of 150 with 3000", got)
	}
	cached := func(tail uint64, cached float64, tokens int64) {
		ref, _ := x.acquireAll(0, fork(tail))
		x.RecordCached(ref, 100, cached)
		x.RecordCount(ref, fork(tail), tokens)
		x.Release(ref, true)
	}
	cached(2, 1600, 3000) // an engine's count is trusted only if it is likely
	if got := stem(); got != 1600 {
		t.Errorf("%d tokens, the engine had 1600", got)
	}
	cached(3, 400, 2000) // some was evicted
	cached(4, 0, 5600)
	send(x, 0, fork(5), 2100)
	if got := stem(); got != 1600 {
		t.Errorf("%d tokens after prompts with other ends", got)
	}
	// A prompt that ends there has the true count.
	send(x, 0, &Chain{Blocks: blocksFrom(1, 100), Weights: w}, 1500)
	cached(6, 1700, 3000)
	if got := stem(); got != 1500 {
		t.Errorf("%d tokens, the engine counted 1500", got)
	}
	// What is known may be wrong by more than the new part has.
	send(x, 0, &Chain{Blocks: append(blocksFrom(1, 90), 8), Weights: w}, 1000)
	var m Match
	x.Match(&Chain{Blocks: append(blocksFrom(1, 90), 8, 9), Weights: w}, &m)
	if m.KnownTokens != 1_000_000 || m.Known != 91 {
		t.Errorf("%d milli-tokens in %v blocks", m.KnownTokens, m.Known)
	}
	x.check(t)
}

// Sums stay right after any counts.
func TestRecordCountKeepsSums(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	x := New(48 << 10)
	x.SetCapacity(3, 0)
	w := Weights{Kinds: new([Kinds]int32)}
	for i := range w.Kinds {
		w.Kinds[i] = int32(rnd.IntN(30_000))
	}
	var refs []Ref
	var m Match
	for i := range 20_000 {
		c := Chain{Past: rnd.Float32(), Weights: w, Root: uint64(rnd.IntN(2))}
		for range rnd.IntN(30) {
			c.Blocks = append(c.Blocks, uint64(rnd.IntN(3)))
		}
		slot := rnd.IntN(4)
		switch rnd.IntN(8) {
		case 0:
			x.SetCapacity(slot, int64(rnd.IntN(2000)))
		case 1:
			x.Touch(slot, &c, int64(rnd.IntN(1000)), -1)
		case 2, 3, 4:
			if ref, _ := x.acquireAll(slot, &c); ref != (Ref{}) {
				refs = append(refs, ref)
			}
		default:
			if len(refs) > 0 {
				k := rnd.IntN(len(refs))
				x.RecordCount(refs[k], &c, int64(rnd.IntN(1000)))
				x.RecordCached(refs[k], rnd.IntN(20), float64(rnd.IntN(300)))
				if len(refs) > 8 || rnd.IntN(2) == 0 {
					x.Release(refs[k], rnd.IntN(3) > 0)
					refs[k] = refs[len(refs)-1]
					refs = refs[:len(refs)-1]
				}
			}
		}
		x.Match(&c, &m)
		for s, held := range m.Held {
			if m.Tokens[s] < 0 || (held == 0) != (m.Tokens[s] == 0) && held == 0 {
				t.Fatalf("slot %d: %d blocks, %d tokens", s, held, m.Tokens[s])
			}
		}
		if i%10 == 0 {
			x.check(t)
		}
	}
}
