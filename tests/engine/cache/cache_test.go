package cache

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// open is a request in both caches.
type both struct {
	seq      *Seq
	model    *modelSeq
	computed int
}

// TestCacheIsTheModel runs the cache beside the naive one: the same hits, the
// same refusals, the same blocks stored and evicted in the same order.
func TestCacheIsTheModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	rec := &recorder{t: t, size: 4, prefix: map[Key]string{}}
	c, m := New(40, 4, rec), newModel(40, 4)
	var open []both
	refused, hits := 0, 0
	for i := range operations / 10 {
		switch n := rng.IntN(10); {
		case n < 3:
			root, tokens := randomPrompt(rng, 40)
			total := len(tokens) + rng.IntN(12)
			p := NewPrompt(root, tokens, 4)
			would := c.Hit(p)
			s, ok := c.Open(p, total)
			ms, mok := m.open(root, tokens, total)
			if ok != mok {
				t.Fatalf("operation %d: opened %v, the model %v", i, ok, mok)
			}
			if !ok {
				refused++
				continue
			}
			if s.Hit() != ms.tokens || would != s.Hit() {
				t.Fatalf("operation %d: hit %d, before it %d, the model %d", i, s.Hit(), would, ms.tokens)
			}
			hits += s.Hit()
			open = append(open, both{s, ms, s.Hit()})
		case n < 8 && len(open) > 0:
			o := &open[rng.IntN(len(open))]
			advance(rng, o, m)
		case n == 8 && len(open) > 0:
			j := rng.IntN(len(open))
			open[j].seq.Close()
			open[j].seq.Close() // changes nothing
			m.close(open[j].model)
			open = slices.Delete(open, j, j+1)
		case n == 9 && rng.IntN(500) == 0:
			if c.Clear() != (len(open) == 0) {
				t.Fatal("cleared although requests hold blocks, or not although none does")
			}
			if len(open) == 0 {
				m.log = append(m.log, "clear")
				for _, b := range m.blocks {
					b.prefix = ""
				}
			}
		}
		if !slices.Equal(rec.log, m.log) {
			t.Fatalf("operation %d: told %q, the model %q", i, rec.log, m.log)
		}
		rec.log, m.log = nil, nil
		if c.Counts() != m.counts() {
			t.Fatalf("operation %d: counts %+v, the model %+v", i, c.Counts(), m.counts())
		}
	}
	if refused == 0 || hits == 0 {
		t.Errorf("%d refused, %d tokens hit: nothing was tried", refused, hits)
	}
}

// advance books some more of a request, in the prompt or after it.
func advance(rng *rand.Rand, o *both, m *model) {
	prompt := o.model.prompt
	room := len(o.model.blocks)*m.size - o.computed
	if o.computed < len(prompt) {
		n := 1 + rng.IntN(len(prompt)-o.computed)
		for _, t := range prompt[o.computed : o.computed+n] {
			m.add(o.model, t)
		}
		o.computed += n
		o.seq.Book(o.computed)
	} else if room > 0 {
		t := uint32(rng.IntN(2))
		m.add(o.model, t)
		o.computed++
		o.seq.Append(t)
	}
}

// TestInvariantsHold does a million operations with a cache that is nearly always
// full, and now and then one that is new.
func TestInvariantsHold(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const capacity, size = 96, 4
	var (
		c        *Cache
		open     []*Seq
		computed []int
		parents  map[Key]Key
		most     int
	)
	for i := range operations {
		if i%(operations/20) == 0 { // the engine starts again
			parents = map[Key]Key{}
			c, open, computed = New(capacity, size, parentsOf{parents}), nil, nil
		}
		n := rng.IntN(10)
		switch {
		case n < 4:
			root, tokens := randomPrompt(rng, 64)
			if s, ok := c.Open(NewPrompt(root, tokens, size), len(tokens)+rng.IntN(20)); ok {
				open, computed = append(open, s), append(computed, s.Hit())
			}
		case len(open) == 0:
		case n < 7:
			j := rng.IntN(len(open))
			s := open[j]
			if left := len(s.prompt.Tokens) - computed[j]; left > 0 {
				computed[j] += 1 + rng.IntN(left)
				s.Book(computed[j])
			} else if computed[j] < len(s.blocks)*size {
				computed[j]++
				s.Append(uint32(rng.IntN(2)))
			}
		default:
			j := rng.IntN(len(open))
			open[j].Close()
			open, computed = slices.Delete(open, j, j+1), slices.Delete(computed, j, j+1)
		}
		most = max(most, c.Counts().Cached)
		if i%100 == 0 {
			if err := check(c, open, parents); err != nil {
				t.Fatalf("operation %d: %v", i, err)
			}
		}
	}
	if most < capacity/4 {
		t.Errorf("at most %d blocks were cached", most)
	}
}

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
	s, ok := c.Open(NewPrompt(root, tokens, c.BlockSize()), len(tokens)+len(answer))
	if !ok {
		t.Fatal("no room")
	}
	defer s.Close()
	s.Book(len(tokens))
	for _, a := range answer[:max(0, len(answer)-1)] {
		s.Append(a)
	}
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
	if k := p.Keys[2]; n.stored[k] != 2 || c.Findable() != 3 || c.Counts().Cached != 4 {
		t.Errorf("last block stored %d times, %d findable, %+v", n.stored[k], c.Findable(), c.Counts())
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

func BenchmarkOpenCachedPrompt(b *testing.B) {
	c := New(16384, 16, nil)
	p := NewPrompt(Root{}, prompt(1, 32000), 16)
	for b.Loop() {
		s, _ := c.Open(p, 32100)
		s.Book(32000)
		s.Close()
	}
}
