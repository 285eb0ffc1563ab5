package cache

import "slices"

// Seq is what one running request holds: blocks for its prompt and its answer.
type Seq struct {
	c      *Cache
	prompt *Prompt
	blocks []int32
	hit    int // tokens
	booked int // blocks that are findable
	parent Key // of the first block that is not
	// The generated part: the tokens since the last full block, those at the
	// prompt's end included.
	tail   []uint32
	closed bool
}

// Open takes up the prompt's cached blocks and reserves the rest of what so many
// tokens, prompt and answer, need. It returns false, and changes nothing, when
// there are not enough free blocks.
func (c *Cache) Open(p *Prompt, tokens int) (*Seq, bool) {
	need := c.BlocksFor(max(tokens, len(p.Tokens)))
	hits := c.match(p)
	free := c.counts.Empty + c.counts.Cached
	for _, k := range p.Keys[:hits] {
		if c.blocks[c.byKey[k]].refs == 0 {
			free-- // it is taken up, not taken
		}
	}
	if need-hits > free {
		return nil, false
	}
	s := &Seq{c: c, prompt: p, blocks: make([]int32, 0, need), hit: hits * c.size, booked: hits, parent: p.Root.Key()}
	for _, k := range p.Keys[:hits] {
		s.blocks = append(s.blocks, c.hold(k))
		s.parent = k
	}
	for len(s.blocks) < need {
		s.blocks = append(s.blocks, c.take())
	}
	return s, true
}

// Grow reserves what more tokens need in all, prompt and answer. It returns false, and
// changes nothing, when there are not enough free blocks. Nobody finds the new blocks.
func (s *Seq) Grow(tokens int) bool {
	need := s.c.BlocksFor(tokens) - len(s.blocks)
	if need > s.c.counts.Empty+s.c.counts.Cached {
		return false
	}
	for range need {
		s.blocks = append(s.blocks, s.c.take())
	}
	return true
}

// Blocks returns how many blocks the request holds.
func (s *Seq) Blocks() int { return len(s.blocks) }

// Hit returns how many tokens of the prompt were cached when the request began.
func (s *Seq) Hit() int { return s.hit }

// Book says that the prompt is computed up to its first n tokens, or will be when
// the step that now begins has ended. From here on others find these blocks: the
// earliest that they can be computing with them is the same step.
func (s *Seq) Book(n int) {
	from, to := s.booked, min(n/s.c.size, len(s.prompt.Keys))
	if from < to {
		s.store(s.prompt.Keys[from:to], s.prompt.Tokens[from*s.c.size:to*s.c.size])
	}
	if n >= len(s.prompt.Tokens) && s.tail == nil {
		s.tail = make([]uint32, 0, s.c.size)
		s.tail = append(s.tail, s.prompt.Tokens[len(s.prompt.Keys)*s.c.size:]...)
	}
}

// Append books one generated token, after the whole prompt was booked. The last
// token of an answer is never booked, for nothing is computed from it.
func (s *Seq) Append(token uint32) {
	s.tail = append(s.tail, token)
	if len(s.tail) < s.c.size {
		return
	}
	s.store([]Key{child(s.parent, s.tail, nil)}, s.tail)
	s.tail = s.tail[:0]
}

// store makes the next blocks findable.
func (s *Seq) store(keys []Key, tokens []uint32) {
	e := Stored{Root: s.prompt.Root, First: s.booked == 0, Parent: s.parent, Keys: keys, Tokens: tokens}
	for _, k := range keys {
		s.c.name(s.blocks[s.booked], k)
		s.booked++
		s.parent = k
	}
	s.c.version++
	if s.c.listener != nil {
		s.c.listener.Stored(e)
	}
}

// Close gives the blocks back, the tail first. What was booked stays cached.
// Closing again does nothing.
func (s *Seq) Close() {
	if s.closed {
		return
	}
	s.closed = true
	for _, b := range slices.Backward(s.blocks) {
		s.c.release(b)
	}
	s.c.version++
}
