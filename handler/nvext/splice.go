package nvext

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// Additions are what is put into the nvext of an answer. A member that
// the engine's nvext has, too, gets the value of these, for its workers are
// not those that the client knows; its other members stay.
type Additions struct {
	// Each is put into each chunk of a stream, and into a plain answer. It is
	// not changed.
	Each []Member
	// Final makes what is put besides into each chunk that has a finish
	// reason, and into a plain answer. Nil makes nothing.
	Final func() []Member

	edits []rawjson.Edit
	text  []byte
}

// maxMembers is how many members are merged with the engine's, of Each and of
// Final: more than the protocol has.
const maxMembers = 64

// EditChunk returns the changes that put the additions into an event of a stream.
// There are none if the event has a name, several lines of data, or no end.
func (a *Additions) EditChunk(f rawjson.Frame) []rawjson.Edit {
	if f.Named || f.Lines != 1 || f.Cut {
		return nil
	}
	return a.Edits(f.Data, true)
}

// Edits returns the changes that put the additions into the nvext of an answer's
// object. They are good until the next call. There are none if the object is
// malformed, an error, or has an nvext that is no object, or if it is a stream's
// chunk without choices, which only chat and completions have.
func (a *Additions) Edits(b []byte, chunk bool) []rawjson.Edit {
	o, ok := lookAt(b)
	if !ok || chunk && !o.choices {
		return nil
	}
	lists := [2][]Member{a.Each}
	if a.Final != nil && (o.finished || !chunk) {
		lists[1] = a.Final()
	}
	if len(lists[0])+len(lists[1]) == 0 {
		return nil
	}
	a.edits = a.edits[:0]
	w := rawjson.Object{Buf: a.text[:0], More: !o.empty}
	at := rawjson.Span{Start: o.brace, End: o.brace}
	switch v := o.nvext; {
	case v.End == 0:
		w.Name("nvext")
		appendObject(&w, lists)
	case v.IsNull(b):
		at = v
		appendObject(&w, lists)
	case v.First(b) == '{':
		at = a.merge(&w, b, v.Start, lists)
	default:
		return nil
	}
	a.text = w.Buf
	a.edits = append(a.edits, rawjson.Edit{Span: at, Text: w.Buf})
	return a.edits
}

// appendObject appends an nvext of the members.
func appendObject(w *rawjson.Object, lists [2][]Member) {
	w.Open()
	for _, all := range lists {
		appendMembers(w, all, 0)
	}
	w.Close()
}

// merge replaces members of the nvext that opens at b[i], and appends those that
// the nvext lacks. It returns where these belong.
func (a *Additions) merge(w *rawjson.Object, b []byte, i int, lists [2][]Member) rawjson.Span {
	var has [2]uint64
	c := rawjson.Enter(b, i)
	for c.Next() {
		name := c.Name()
		v := c.Value()
		for l, all := range lists {
			for n, one := range all {
				if one.Name == name && n < maxMembers {
					has[l] |= 1 << n
					a.edits = append(a.edits, rawjson.Edit{Span: v, Text: one.Value})
				}
			}
		}
	}
	w.More = !c.Empty
	for l, all := range lists {
		appendMembers(w, all, has[l])
	}
	return rawjson.Span{Start: c.At - 1, End: c.At - 1}
}

// looked is what is seen of an answer's object.
type looked struct {
	nvext    rawjson.Span // the last, the zero Span if there is none
	brace    int          // where the closing bracket is
	empty    bool         // it has no members
	choices  bool         // it has a list of choices
	finished bool         // one of them has a finish reason
}

// lookAt looks at an object. It is not ok if it is something else, malformed
// or an error.
func lookAt(b []byte) (o looked, ok bool) {
	c, ok := rawjson.Open(b)
	for ok && c.Next() {
		name := c.Name()
		v := c.Value()
		switch name {
		case "nvext":
			o.nvext = v
		case "error":
			ok = v.IsNull(b)
		case "object":
			ok = string(v.Of(b)) != `"error"`
		case "choices":
			o.choices = v.First(b) == '['
			o.finished = finished(b, v)
		}
	}
	o.brace, o.empty = c.At-1, c.Empty
	return o, ok && c.Alone()
}

// finished tells whether one of the choices has a finish reason.
func finished(b []byte, choices rawjson.Span) bool {
	for choice := range choices.Objects(b) {
		switch string(choice.Get(b, "finish_reason").Of(b)) {
		case "", "null", `""`:
		default:
			return true
		}
	}
	return false
}
