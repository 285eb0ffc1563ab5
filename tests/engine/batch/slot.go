package batch

import "github.com/caddy-kvrouter/kvrouter/tests/engine/cache"

// Slot is the KV of a session between two requests. Its blocks are used ones: nothing
// evicts them, and nobody else finds what is in them, the first prompt excepted. The
// zero value is empty. An aborted request empties the slot that it has, if it ran.
type Slot struct {
	seq  *cache.Seq
	held int
}

// Held returns for how many tokens the slot has KV.
func (s *Slot) Held() int { return s.held }

// Blocks returns how many blocks the slot holds.
func (s *Slot) Blocks() int {
	if s.seq == nil {
		return 0
	}
	return s.seq.Blocks()
}

// Release gives the blocks back. No request may have the slot.
func (s *Slot) Release() {
	if s.seq != nil {
		s.seq.Close()
	}
	*s = Slot{}
}

// enter takes up the KV that there is of a request's prompt, and reserves the rest. It
// returns false, and changes nothing, when there are not enough free blocks.
func (e *entry) enter(c *cache.Cache) bool {
	if e.Slot != nil && e.Slot.seq != nil {
		if !e.Slot.seq.Grow(e.blockTokens()) {
			return false
		}
		e.seq, e.kept, e.computed = e.Slot.seq, true, min(e.Slot.held, len(e.Prompt.Tokens)-1)
		return true
	}
	seq, ok := c.Open(e.Prompt, e.blockTokens())
	if ok {
		e.seq, e.computed = seq, max(seq.Hit(), min(e.Loaded, len(e.Prompt.Tokens)-1))
	}
	return ok
}

// leave gives the request's blocks back, or to its slot.
func (e *entry) leave() {
	if e.Slot == nil {
		e.seq.Close()
		return
	}
	*e.Slot = Slot{e.seq, len(e.Prompt.Tokens) + len(e.Answer)}
}
