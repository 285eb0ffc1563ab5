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
	hits, back := c.match(p)
	free := len(c.blocks) - c.used
	for _, k := range p.Keys[:hits] {
		if c.blocks[c.byKey[k]].refs == 0 {
			free-- // it is taken up, not taken
		}
	}
	if need-hits > free {
		return nil, false
	}
	s := &Seq{c: c, prompt: p, blocks: make([]int32, 0, need), hit: (hits + back) * c.size, booked: hits, parent: p.Root.Key()}
	for _, k := range p.Keys[:hits] {
		s.blocks = append(s.blocks, c.hold(k))
		s.parent = k
	}
	for len(s.blocks) < need {
		s.blocks = append(s.blocks, c.take())
	}
	if back > 0 {
		s.store(p.run(hits, hits+back))
	}
	if c.host != nil {
		c.host.put(p.run(0, hits+back))
	}
	return s, true
}

// run returns a run of a prompt's blocks.
func (p *Prompt) run(from, to int) Stored {
	r := Stored{Root: p.Root, First: from == 0, Parent: p.Root.Key(), Keys: p.Keys[from:to], Tokens: p.Tokens[from*p.size : to*p.size], Media: p.mediaOfRun(from, to-from), Session: p.Session}
	if from > 0 {
		r.Parent = p.Keys[from-1]
	}
	return r
}

// Grow reserves what more tokens need in all, prompt and answer. It returns false, and
// changes nothing, when there are not enough free blocks. Nobody finds the new blocks.
func (s *Seq) Grow(tokens int) bool {
	need := s.c.BlocksFor(tokens) - len(s.blocks)
	if need > len(s.c.blocks)-s.c.used {
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
		s.store(s.prompt.run(from, to))
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
	s.store(s.generated([]Key{child(s.parent, s.tail, s.prompt.mediaOf(s.booked), nil)}, s.tail))
	s.tail = s.tail[:0]
}

// Extend books generated tokens as Append does, all at once.
func (s *Seq) Extend(tokens []uint32) {
	s.tail = append(s.tail, tokens...)
	full := len(s.tail) / s.c.size
	if full == 0 {
		return
	}
	keys, parent := make([]Key, full), s.parent
	for i := range keys {
		keys[i] = child(parent, s.tail[i*s.c.size:(i+1)*s.c.size], s.prompt.mediaOf(s.booked+i), nil)
		parent = keys[i]
	}
	s.store(s.generated(keys, s.tail[:full*s.c.size]))
	s.tail = append(s.tail[:0], s.tail[full*s.c.size:]...)
}

// generated returns a run behind the booked blocks.
func (s *Seq) generated(keys []Key, tokens []uint32) Stored {
	return Stored{
		Root: s.prompt.Root, First: s.booked == 0, Parent: s.parent, Keys: keys, Tokens: tokens,
		Media: s.prompt.mediaOfRun(s.booked, len(keys)), Session: s.prompt.Session,
	}
}

// store makes the next blocks findable.
func (s *Seq) store(e Stored) {
	s.c.version++
	if s.c.unique {
		if e = s.share(e); len(e.Keys) == 0 {
			return
		}
	}
	for _, k := range e.Keys {
		s.c.name(s.blocks[s.booked], k)
		s.booked++
		s.parent = k
	}
	if s.c.listener != nil {
		s.c.listener.Stored(e)
	}
	if s.c.host != nil {
		s.c.host.put(e)
	}
}

// share holds the blocks of a run that others have made findable, in place of the
// request's own. It returns the rest of the run.
func (s *Seq) share(e Stored) Stored {
	n := s.c.held(e.Keys)
	for _, k := range e.Keys[:n] {
		own := s.blocks[s.booked]
		s.blocks[s.booked] = s.c.hold(k)
		s.c.release(own)
		s.booked++
		s.parent = k
	}
	if n > 0 {
		e.First, e.Parent, e.Keys, e.Tokens = false, s.parent, e.Keys[n:], e.Tokens[n*s.c.size:]
		e.Media = e.Media[min(n, len(e.Media)):]
	}
	return e
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
