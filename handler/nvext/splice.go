package nvext

// Additions are what a filter puts into the nvext of an answer. A member that
// the engine's nvext has, too, gets the value of these, for its workers are
// not those that the client knows; its other members stay.
type Additions struct {
	// Each is put into each chunk of a stream, and into a plain answer. It is
	// not changed.
	Each []Member
	// Final makes what is put besides into each chunk that has a finish
	// reason, and into a plain answer. Nil makes nothing.
	Final func() []Member
}

// maxMembers is how many members are merged with the engine's, of Each and of
// Final: more than the protocol has.
const maxMembers = 64

// splice appends an object of an answer with the additions in its nvext. It
// returns false, and dst as it was, if the object is not to be changed: it is
// malformed, an error, or has an nvext that is no object; or it is a chunk
// without choices, which only chat and completions have.
func (a *Additions) splice(dst, b []byte, chunk bool) ([]byte, bool) {
	o, ok := lookAt(b)
	if !ok || chunk && !o.choices {
		return dst, false
	}
	lists := [2][]Member{a.Each}
	if a.Final != nil && (o.finished || !chunk) {
		lists[1] = a.Final()
	}
	if len(lists[0])+len(lists[1]) == 0 {
		return dst, false
	}
	m := members{dst: dst}
	switch v := o.nvext; {
	case v.End == 0:
		m.dst, m.more = append(m.dst, b[:o.brace]...), !o.empty
		m.name("nvext")
		m.object(lists)
		m.dst = append(m.dst, b[o.brace:]...)
	case string(b[v.Start:v.End]) == "null":
		m.dst = append(m.dst, b[:v.Start]...)
		m.object(lists)
		m.dst = append(m.dst, b[v.End:]...)
	case b[v.Start] == '{':
		m.merge(b, v.Start, lists)
	default:
		return dst, false
	}
	return m.dst, true
}

// object writes an nvext of the members.
func (m *members) object(lists [2][]Member) {
	m.dst = append(m.dst, '{')
	m.more = false
	for _, all := range lists {
		m.all(all, 0)
	}
	m.dst = append(m.dst, '}')
}

// merge writes b, with the members in the nvext that opens at b[i].
func (m *members) merge(b []byte, i int, lists [2][]Member) {
	var has [2]uint64
	at := 0
	w := enter(b, i)
	for w.next() {
		name := w.name()
		v := w.value()
		for l, all := range lists {
			for n, one := range all {
				if one.Name == name && n < maxMembers {
					has[l] |= 1 << n
					m.dst = append(append(m.dst, b[at:v.Start]...), one.Value...)
					at = v.End
				}
			}
		}
	}
	m.dst = append(m.dst, b[at:w.i-1]...)
	m.more = w.begun
	for l, all := range lists {
		m.all(all, has[l])
	}
	m.dst = append(m.dst, b[w.i-1:]...)
}

// looked is what is seen of an answer's object.
type looked struct {
	nvext    Span // the last, the zero Span if there is none
	brace    int  // where the closing bracket is
	empty    bool // it has no members
	choices  bool // it has a list of choices
	finished bool // one of them has a finish reason
}

// lookAt looks at an object. It is not ok if it is something else, malformed
// or an error.
func lookAt(b []byte) (o looked, ok bool) {
	i := skipSpace(b, 0)
	if i == len(b) || b[i] != '{' {
		return o, false
	}
	w := enter(b, i)
	for w.next() {
		name := w.name()
		v := w.value()
		if w.bad {
			break
		}
		raw := b[v.Start:v.End]
		switch name {
		case "nvext":
			o.nvext = v
		case "error":
			if string(raw) != "null" {
				return o, false
			}
		case "object":
			if string(raw) == `"error"` {
				return o, false
			}
		case "choices":
			if o.choices = raw[0] == '['; o.choices {
				o.finished = finished(b, v.Start)
			}
		}
	}
	o.brace, o.empty = w.i-1, !w.begun
	return o, w.done && skipSpace(b, w.i) == len(b)
}

// finished tells whether one of the choices at b[i] has a finish reason.
func finished(b []byte, i int) bool {
	w := enter(b, i)
	for w.next() {
		choice := w.value()
		if w.bad || b[choice.Start] != '{' {
			continue
		}
		in := enter(b, choice.Start)
		for in.next() {
			name := in.name()
			v := in.value()
			if name != "finish_reason" || in.bad {
				continue
			}
			switch string(b[v.Start:v.End]) {
			case "null", `""`:
			default:
				return true
			}
		}
	}
	return false
}
