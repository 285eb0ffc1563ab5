package api

// cutter collects the members that are to be cut out of an object, with the
// commas that must go with them. It is told of all members in order, each
// with the comma before it (-1 for the first).
//
// A member behind one that stays takes the comma before it; one that nothing
// stays before takes the comma behind it. So each takes exactly one, except
// where the object is left empty.
type cutter struct {
	spans []span
	kept  bool // a member that stays has been seen
	open  bool // the last span is to be extended to the comma behind it
}

// keep notes a member that stays.
func (c *cutter) keep(comma int) {
	c.close(comma)
	c.kept = true
}

// drop notes a member that goes: its key's start and its value's end.
func (c *cutter) drop(start, end, comma int) {
	c.close(comma)
	if c.kept {
		start = comma
	}
	c.spans = append(c.spans, span{start, end})
	c.open = !c.kept
}

func (c *cutter) close(comma int) {
	if c.open {
		c.spans[len(c.spans)-1].end = comma + 1
		c.open = false
	}
}

// Cut returns the body without its nvext members: the segments between them,
// in order, which are parts of body and to be sent one after the other. A
// member that is null stays, as engines take null for absent. No other byte
// is changed, and what was valid JSON stays so. It is nil when there is
// nothing to cut. The body must be the one that was parsed.
func (r *Request) Cut(body []byte) [][]byte {
	if len(r.cuts) == 0 || len(body) != r.size {
		return nil
	}
	out := make([][]byte, 0, len(r.cuts)+1)
	at := 0
	for _, s := range r.cuts {
		if s.start > at {
			out = append(out, body[at:s.start])
		}
		at = s.end
	}
	return append(out, body[at:])
}
