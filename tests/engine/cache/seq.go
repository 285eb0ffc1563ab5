package cache

import "slices"

// Seq is what one running request holds: blocks for its prompt and its answer.
type Seq struct {
	c      *Cache
	prompt Prompt // with the answer so far
	blocks []*block
	hit    int // tokens
	booked int // blocks that are findable
}

// Open takes up the prompt's cached blocks and reserves the rest of what so many
// tokens, prompt and answer, need. It returns false, and changes nothing, when
// there are not enough free blocks.
func (c *Cache) Open(p *Prompt, tokens int) (*Seq, bool) {
	hits, back := c.match(p)
	need := c.BlocksFor(max(tokens, len(p.Tokens))) - hits
	idle := 0 // of the hits: they are taken up, not taken
	for _, k := range p.Keys[:hits] {
		if c.byKey[k][0].refs == 0 {
			idle++
		}
	}
	if need > c.free()-idle {
		return nil, false
	}
	s := &Seq{c: c, prompt: *p, hit: (hits + back) * c.size, booked: hits}
	s.prompt.Tokens, s.prompt.Keys = slices.Clip(p.Tokens), slices.Clip(p.Keys)
	for _, k := range p.Keys[:hits] {
		s.blocks = append(s.blocks, c.hold(k))
	}
	s.reserve(need)
	if back > 0 {
		s.store(p.blocks(hits, hits+back))
	}
	if c.Host != nil {
		c.Host.put(p.blocks(0, hits+back))
	}
	return s, true
}

func (s *Seq) reserve(blocks int) {
	for range blocks {
		s.blocks = append(s.blocks, s.c.take())
	}
}

// Grow reserves what more tokens need in all, prompt and answer. It returns false, and
// changes nothing, when there are not enough free blocks. Nobody finds the new blocks.
func (s *Seq) Grow(tokens int) bool {
	need := s.c.BlocksFor(tokens) - len(s.blocks)
	if need > s.c.free() {
		return false
	}
	s.reserve(need)
	return true
}

// Hit returns how many tokens of the prompt were cached when the request began.
func (s *Seq) Hit() int { return s.hit }

// Book says that the prompt is computed up to its first n tokens, or will be when
// the step that now begins has ended. From here on others find these blocks: the
// earliest that they can be computing with them is the same step.
func (s *Seq) Book(n int) {
	if to := min(n/s.c.size, len(s.prompt.Keys)); s.booked < to {
		s.store(s.prompt.blocks(s.booked, to))
	}
}

// Append books generated tokens, after the whole prompt was booked. The last
// token of an answer is never booked, for nothing is computed from it.
func (s *Seq) Append(tokens ...uint32) {
	s.prompt.extend(tokens)
	s.Book(len(s.prompt.Tokens))
}

// store makes the next blocks findable. A cache with unique prefixes takes those that others have
// made findable in place of the request's own.
func (s *Seq) store(e Stored) {
	if s.c.Unique {
		there, _ := s.c.held(e.Keys)
		for _, k := range e.Keys[:there] {
			own := s.blocks[s.booked]
			s.blocks[s.booked] = s.c.hold(k)
			s.c.release(own)
			s.booked++
		}
		if e = e.slice(there, len(e.Keys)); len(e.Keys) == 0 {
			return
		}
	}
	for _, k := range e.Keys {
		s.c.name(s.blocks[s.booked], k)
		s.booked++
	}
	s.c.listener.Stored(e)
	if s.c.Host != nil {
		s.c.Host.put(e)
	}
}

// Close gives the blocks back, the tail first. What was booked stays cached.
// Closing again does nothing.
func (s *Seq) Close() {
	for _, b := range slices.Backward(s.blocks) {
		s.c.release(b)
	}
	s.blocks = nil
}
