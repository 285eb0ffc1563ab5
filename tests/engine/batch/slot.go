package batch

import "github.com/caddy-kvrouter/kvrouter/tests/engine/cache"

// Slot is the KV of a session between two requests. Its blocks are used ones: nothing
// evicts them, and nobody else finds what is in them, the first prompt excepted. The
// zero value is empty. An aborted request empties the slot that it has, if it ran.
type Slot struct {
	seq  *cache.Seq
	held int // tokens
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
func (r *Request) enter(c *cache.Cache) bool {
	if r.Slot != nil && r.Slot.seq != nil {
		if !r.Slot.seq.Grow(r.blockTokens()) {
			return false
		}
		r.seq, r.kept, r.computed = r.Slot.seq, true, min(r.Slot.held, len(r.Prompt.Tokens)-1)
		return true
	}
	seq, ok := c.Open(r.Prompt, r.blockTokens())
	if ok {
		r.seq, r.computed = seq, max(seq.Hit(), min(r.Loaded, len(r.Prompt.Tokens)-1))
	}
	return ok
}

// leave gives the request's blocks back, or to its slot.
func (r *Request) leave() {
	if r.Slot == nil {
		r.seq.Close()
		return
	}
	*r.Slot = Slot{r.seq, len(r.Prompt.Tokens) + len(r.Answer)}
}
