package api

// Inner returns where the values of a member are in what another member of the
// body has: an object, or a list of objects and nulls. Of several of one name it
// has all, for readers differ in which of them counts. Nothing and null have none.
// It is not ok if the value is something else, or has too many.
func (e *Editor) Inner(name, member string) (at []Span, ok bool) {
	i := e.last(name)
	if i < 0 {
		return nil, true
	}
	if at, ok = e.InnerAt(Span{e.members[i].start, e.members[i].end}, member); ok {
		e.dropBefore(name, i)
	}
	return at, ok
}

// InnerAt is Inner for a value at a place of the body.
func (e *Editor) InnerAt(value Span, member string) (at []Span, ok bool) {
	switch e.body[value.Start] {
	case '{':
		return e.valuesIn(nil, value.Start, member)
	case '[':
		c := enter(e.body, value.Start, 0)
		for c.next() {
			v := c.value()
			if isNull(v.of(e.body)) {
				continue
			}
			if v.first(e.body) != '{' {
				return nil, false
			}
			if at, ok = e.valuesIn(at, v.start, member); !ok {
				return nil, false
			}
		}
		return at, c.err == nil
	}
	return nil, isNull(e.Text(value))
}

// valuesIn appends where the values of a member are in the object that opens at
// body[i].
func (e *Editor) valuesIn(at []Span, i int, member string) (all []Span, ok bool) {
	c := enter(e.body, i, 0)
	for c.next() {
		is := string(c.key()) == member
		v := c.value()
		if !is {
			continue
		}
		if len(at) == maxElements {
			return nil, false
		}
		at = append(at, Span{v.start, v.end})
	}
	return at, c.err == nil
}
