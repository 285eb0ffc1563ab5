package cache

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// model is a naive cache to check the real one against. It is a list of blocks
// with the text of their whole prefix, searched from end to end.
type model struct {
	size   int
	blocks []*modelBlock
	clock  int
	log    []string
}

type modelBlock struct {
	prefix string // of all tokens up to the block's end; empty if it holds none
	refs   int
	freed  int // when it was last given back
	stored int // when it got its prefix
}

type modelSeq struct {
	prefix string
	tokens int
	blocks []*modelBlock
	prompt []uint32
}

func newModel(blocks, size int) *model {
	m := &model{size: size}
	for range blocks {
		m.blocks = append(m.blocks, &modelBlock{})
	}
	return m
}

func text(root Root, tokens []uint32) string {
	b := []byte(root.LoRA + "|" + root.Salt + "|")
	for _, t := range tokens {
		b = append(b, byte(t))
	}
	return string(b)
}

// oldest returns the first block that got a prefix, or nil.
func (m *model) oldest(prefix string) *modelBlock {
	var best *modelBlock
	for _, b := range m.blocks {
		if b.prefix == prefix && (best == nil || b.stored < best.stored) {
			best = b
		}
	}
	return best
}

func (m *model) open(root Root, prompt []uint32, total int) (*modelSeq, bool) {
	var hits []*modelBlock
	for n := m.size; n < len(prompt); n += m.size {
		b := m.oldest(text(root, prompt[:n]))
		if b == nil {
			break
		}
		hits = append(hits, b)
	}
	need := (max(total, len(prompt)) + m.size - 1) / m.size
	free := 0
	for _, b := range m.blocks {
		if b.refs == 0 && !slices.Contains(hits, b) {
			free++
		}
	}
	if need-len(hits) > free {
		return nil, false
	}
	s := &modelSeq{prefix: text(root, nil), tokens: len(hits) * m.size, blocks: hits, prompt: prompt}
	s.prefix = text(root, prompt[:s.tokens])
	for _, b := range hits {
		b.refs++
	}
	for len(s.blocks) < need {
		b := m.victim()
		if b.prefix != "" {
			m.log = append(m.log, "-"+b.prefix)
		}
		*b = modelBlock{refs: 1}
		s.blocks = append(s.blocks, b)
	}
	return s, true
}

func (m *model) victim() *modelBlock {
	var best *modelBlock
	for _, b := range m.blocks {
		if b.refs > 0 {
			continue
		}
		if b.prefix == "" {
			return b
		}
		if best == nil || b.freed < best.freed {
			best = b
		}
	}
	return best
}

// add books one more token of a request.
func (m *model) add(s *modelSeq, t uint32) {
	s.prefix += string([]byte{byte(t)})
	s.tokens++
	if s.tokens%m.size == 0 {
		b := s.blocks[s.tokens/m.size-1]
		m.clock++
		b.prefix, b.stored = s.prefix, m.clock
		m.log = append(m.log, "+"+b.prefix)
	}
}

func (m *model) close(s *modelSeq) {
	for _, b := range slices.Backward(s.blocks) {
		m.clock++
		b.refs--
		b.freed = m.clock
	}
}

func (m *model) counts() (n Counts) {
	for _, b := range m.blocks {
		switch {
		case b.refs > 0:
			n.Used++
		case b.prefix != "":
			n.Cached++
		default:
			n.Empty++
		}
	}
	return n
}

// recorder turns what a cache tells into the model's words.
type recorder struct {
	t      *testing.T
	size   int
	prefix map[Key]string
	log    []string
}

func (r *recorder) Stored(s Stored) {
	parent := text(s.Root, nil)
	if !s.First {
		parent = r.prefix[s.Parent]
	}
	if len(s.Tokens) != len(s.Keys)*r.size {
		r.t.Fatalf("%d tokens for %d blocks", len(s.Tokens), len(s.Keys))
	}
	for i, k := range s.Keys {
		for _, t := range s.Tokens[i*r.size : (i+1)*r.size] {
			parent += string([]byte{byte(t)})
		}
		r.prefix[k] = parent
		r.log = append(r.log, "+"+parent)
	}
}

func (r *recorder) Removed(k Key) { r.log = append(r.log, "-"+r.prefix[k]) }
func (r *recorder) Cleared()      { r.log = append(r.log, "clear") }

// check looks at every block. Each is in one state, and references are those of
// the open requests. The free list has all free blocks, with the empty ones
// first. The parent of each findable block is findable.
func check(c *Cache, open []*Seq, parents map[Key]Key) error {
	refs := make([]int, len(c.blocks))
	for _, s := range open {
		for _, b := range s.blocks {
			refs[b]++
		}
	}
	var n Counts
	keyed := 0
	for i, b := range c.blocks {
		if b.refs != refs[i] {
			return fmt.Errorf("block %d has %d references, %d hold it", i, b.refs, refs[i])
		}
		switch {
		case b.refs > 0:
			n.Used++
		case b.keyed:
			n.Cached++
		default:
			n.Empty++
		}
		if !b.keyed {
			continue
		}
		keyed++
		if _, ok := c.byKey[b.key]; !ok {
			return fmt.Errorf("block %d is not found by its key", i)
		}
		if p, ok := parents[b.key]; ok {
			if _, ok := c.byKey[p]; !ok {
				return fmt.Errorf("block %d is cached, its parent is not", i)
			}
		}
	}
	if n != c.counts || n.Empty+n.Used+n.Cached != len(c.blocks) {
		return fmt.Errorf("counts %+v, blocks say %+v of %d", c.counts, n, len(c.blocks))
	}
	free, last, cached := 0, none, false
	for i := c.head; i != none; last, i = i, c.blocks[i].next {
		b := c.blocks[i]
		if b.refs != 0 || b.prev != last || cached && !b.keyed {
			return fmt.Errorf("free list is broken at block %d", i)
		}
		cached = b.keyed
		free++
	}
	if free != n.Empty+n.Cached || c.tail != last {
		return fmt.Errorf("%d blocks in the free list, want %d", free, n.Empty+n.Cached)
	}
	found := 0
	for k, first := range c.byKey {
		for i := first; ; {
			found++
			b := c.blocks[i]
			if !b.keyed || b.key != k || c.blocks[b.sameNext].samePrev != i {
				return fmt.Errorf("ring of key %x is broken at block %d", k, i)
			}
			if i = b.sameNext; i == first {
				break
			}
		}
	}
	if found != keyed {
		return fmt.Errorf("%d blocks have a key, %d can be found", keyed, found)
	}
	return nil
}

// parentsOf notes each key's parent while the cache tells of it.
type parentsOf struct {
	of map[Key]Key
}

func (p parentsOf) Stored(s Stored) {
	parent, has := s.Parent, !s.First
	for _, k := range s.Keys {
		if has {
			p.of[k] = parent
		}
		parent, has = k, true
	}
}
func (parentsOf) Removed(Key) {}
func (parentsOf) Cleared()    {}

// randomPrompt is short and of few different tokens, so that prefixes are shared.
func randomPrompt(rng *rand.Rand, most int) (Root, []uint32) {
	var root Root
	switch rng.IntN(8) {
	case 0:
		root.Salt = "s"
	case 1:
		root.LoRA = "a"
	}
	tokens := make([]uint32, 1+rng.IntN(most))
	for i := range tokens {
		if i%4 == 0 {
			tokens[i] = uint32(rng.IntN(3))
		}
	}
	return root, tokens
}
