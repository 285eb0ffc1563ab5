package cache

import (
	"slices"
	"testing"
)

// prompt returns n tokens that no other start has.
func prompt(start uint32, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = start + uint32(i)
	}
	return out
}

// run computes a prompt and its answer, and returns the hit.
func run(t *testing.T, c *Cache, root Root, tokens, answer []uint32) int {
	t.Helper()
	s, ok := c.Open(NewPrompt(root, tokens, c.size), len(tokens)+len(answer))
	if !ok {
		t.Fatal("no room")
	}
	defer s.Close()
	s.Book(len(tokens))
	s.Append(answer[:max(0, len(answer)-1)]...)
	return s.Hit()
}

// TestHitsOfARealEngine has the numbers that a vLLM with blocks of 32 gave.
func TestHitsOfARealEngine(t *testing.T) {
	root := Root{Model: "m"}
	for _, tc := range []struct {
		name                  string
		first, answer, second int
		want                  int
	}{
		{"three full blocks", 96, 0, 96, 64},
		{"one token more", 97, 0, 97, 96},
		{"answer in the next prompt", 80, 60, 140, 128},
		{"second turn of a chat", 355, 40, 413, 384},
		{"block that the last token would fill", 80, 48, 160, 96},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := New(100, 32, nil)
			all := prompt(7, max(tc.second, tc.first+tc.answer))
			if hit := run(t, c, root, all[:tc.first], all[tc.first:tc.first+tc.answer]); hit != 0 {
				t.Errorf("an empty cache hit %d", hit)
			}
			if hit := run(t, c, root, all[:tc.second], nil); hit != tc.want {
				t.Errorf("hit %d, want %d", hit, tc.want)
			}
			for _, other := range []Root{{Model: "m", LoRA: "a"}, {Model: "m", Salt: "s"}, {Model: "n"}} {
				if hit := run(t, c, other, all[:tc.second], nil); hit != 0 {
					t.Errorf("%+v hit %d of another root", other, hit)
				}
			}
		})
	}
}

// counter counts how often each key is told of.
type counter struct{ stored, removed map[Key]int }

func (n counter) Stored(s Stored) {
	for _, k := range s.Keys {
		n.stored[k]++
	}
}
func (n counter) Removed(k Key) { n.removed[k]++ }
func (n counter) Cleared()      {}

// TestTheSameBlockTwice repeats a prompt of exactly three blocks. The last one is
// computed again, so it is there twice, and is stored and removed twice.
func TestTheSameBlockTwice(t *testing.T) {
	n := counter{map[Key]int{}, map[Key]int{}}
	c := New(8, 32, n)
	p := NewPrompt(Root{}, prompt(1, 96), 32)
	for range 2 {
		run(t, c, Root{}, p.Tokens, nil)
	}
	if k := p.Keys[2]; n.stored[k] != 2 || len(c.byKey) != 3 || c.used != 0 {
		t.Errorf("last block stored %d times, %d findable, %d held", n.stored[k], len(c.byKey), c.used)
	}
	run(t, c, Root{}, prompt(1000, 8*32), nil)
	for i, want := range []int{1, 1, 2} {
		if got := n.removed[p.Keys[i]]; got != want {
			t.Errorf("block %d was removed %d times, want %d", i, got, want)
		}
	}
}

// TestTailsGoBeforeHeads fills a cache with two prompts and makes room for one
// block more: it is the tail of the one not used for longer.
func TestTailsGoBeforeHeads(t *testing.T) {
	c := New(8, 4, nil)
	a, b := prompt(100, 16), prompt(200, 16)
	run(t, c, Root{}, a, nil)
	run(t, c, Root{}, b, nil)
	run(t, c, Root{}, prompt(300, 4), nil)
	probe := func(tokens []uint32) int { return c.Hit(NewPrompt(Root{}, append(slices.Clone(tokens), 0), 4)) }
	if x, y := probe(a), probe(b); x != 12 || y != 16 {
		t.Errorf("%d and %d tokens are left of 16 each, want 12 and 16", x, y)
	}
}
