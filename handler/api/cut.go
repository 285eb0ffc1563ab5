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

// AskUsage returns the body as Cut does, with one more change: the engine is
// asked to report usage at the end of its stream. "include_usage":true is
// spliced into stream_options, which is made if the body has none or null. It
// is nil if nothing is to be asked: no stream, an API whose streams have their
// usage anyway, or a client that asks itself. That is also one that has a
// stream_options without a word of include_usage, which vLLM takes for a yes,
// or asks for usage in each chunk. Otherwise the answer has one chunk that the
// client did not ask for: take it out with a UsageFilter.
func (r *Request) AskUsage(body []byte) [][]byte {
	at, text := r.usageEdit(body)
	if text == "" {
		return nil
	}
	out := make([][]byte, 0, len(r.cuts)+3)
	from := 0
	put := func(s span, text string) {
		if s.start > from {
			out = append(out, body[from:s.start])
		}
		if text != "" {
			out = append(out, []byte(text))
		}
		from = s.end
	}
	for _, s := range r.cuts {
		if text != "" && at.start <= s.start {
			put(at, text)
			text = ""
		}
		put(s, "")
	}
	if text != "" {
		put(at, text)
	}
	return append(out, body[from:])
}

// usageEdit returns what AskUsage puts in the place of what.
func (r *Request) usageEdit(b []byte) (at span, text string) {
	const ask = `"include_usage":true`
	switch r.API.(type) {
	case chat, completions:
	default:
		return at, ""
	}
	if !r.Stream || len(b) != r.size {
		return at, ""
	}
	v := r.options
	switch {
	case v.end == 0:
		// There is another member, stream, for the comma.
		return span{r.brace + 1, r.brace + 1}, `"stream_options":{` + ask + `},`
	case isNull(v.of(b)):
		return v, `{` + ask + `}`
	case v.first(b) != '{':
		return at, "" // the engine will say what is wrong with it
	}
	if each := member(b, v, "continuous_usage_stats"); each.end > 0 && !isNo(each.of(b)) {
		return at, ""
	}
	if had := member(b, v, "include_usage"); had.end > 0 && isNo(had.of(b)) {
		return had, "true"
	}
	return at, ""
}
