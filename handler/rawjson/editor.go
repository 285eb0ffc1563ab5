package rawjson

import (
	"cmp"
	"iter"
	"slices"
)

// Editor collects changes of an object's members, at most one for each name. All
// other bytes stay, and valid JSON stays valid. If a name repeats, the last member
// counts, as for engines. A change of that one cuts out the others, because readers
// differ. Editors find escaped names, too, up to 32 bytes. An Editor of a list only
// drops elements.
type Editor struct {
	Body    []byte
	end     int // where the object's closing bracket is; 0 for a new object
	members []member
	added   []addition
	raw     []Edit
	within  []object
}

type member struct {
	key int // its key's opening quote; where an element begins
	Span
	text []byte // the new value; nil if it does not change
	drop bool
}

type addition struct {
	name string
	text []byte
}

// object is an object within the body whose members are changed.
type object struct {
	name string // the member's; empty for an object of At
	*Editor
}

// maxWithin bounds the members of an object within a body that is edited. Each costs more
// memory than it takes in the body.
const maxWithin = 256

// Member is where an object's member is: its key's opening quote, and its value.
type Member struct{ Key, Start, End uint32 }

// NewEditor returns an Editor for the object whose closing bracket is body[end], with these
// members.
func NewEditor(body []byte, end int, members []Member) *Editor {
	e := &Editor{Body: body, end: end, members: make([]member, len(members))}
	for i, m := range members {
		e.members[i] = member{key: int(m.Key), Span: Span{int(m.Start), int(m.End)}}
	}
	return e
}

// EditAt returns an Editor for the valid object or list at body[at]; nil if it has more
// than most members.
func EditAt(body []byte, at, most int) *Editor {
	e := &Editor{Body: body}
	c := Enter(body, at)
	for c.Next() {
		m := member{key: c.At}
		if c.shut == '}' {
			m.key = c.KeyAt
		}
		if m.Span = c.Value(); len(e.members) == most {
			return nil
		}
		e.members = append(e.members, m)
	}
	e.end = c.At - 1
	return e
}

// EditObject returns an Editor for a valid object; nil if it has too many members.
func EditObject(text []byte) *Editor { return EditAt(text, 0, maxWithin) }

func (e *Editor) is(m *member, name string) bool { return string(e.keyOf(m)) == name }

func (e *Editor) keyOf(m *member) []byte { return KeyAt(e.Body, m.key) }

// KeyAt returns the key whose opening quote is at a position of a valid body, unescaped.
func KeyAt(body []byte, at int) []byte {
	end, _ := SkipString(body, at)
	return unescapeKey(body[at+1 : end-1])
}

// last returns the last member of a name, nil if there is none. With set, one that is null does not
// count.
func (e *Editor) last(name string, set bool) *member {
	for i := len(e.members) - 1; i >= 0; i-- {
		if m := &e.members[i]; (!set || !m.IsNull(e.Body)) && e.is(m, name) {
			return m
		}
	}
	return nil
}

func (m *member) at() (at Span) {
	if m != nil {
		at = m.Span
	}
	return at
}

// All yields an object's members, with their names.
func (e *Editor) All() iter.Seq2[string, Span] {
	return func(yield func(string, Span) bool) {
		for i := range e.members {
			if m := &e.members[i]; !yield(View(e.keyOf(m)), m.Span) {
				return
			}
		}
	}
}

// At returns where a member's value is, the zero Span if there is none.
func (e *Editor) At(name string) Span { return e.last(name, false).at() }

// Value returns a member's value as it is written, nil if there is none.
func (e *Editor) Value(name string) []byte {
	if v := e.At(name); v.End > 0 {
		return v.Of(e.Body)
	}
	return nil
}

// Given returns where the last value of a name is that is not null, the zero Span if there is none.
func (e *Editor) Given(name string) Span { return e.last(name, true).at() }

// IsSet returns whether any member of a name has a value that is not null.
func (e *Editor) IsSet(name string) bool { return e.last(name, true) != nil }

// Set gives a member a value, which is JSON. It adds a new member at the object's
// end.
func (e *Editor) Set(name string, text []byte) {
	m := e.last(name, false)
	if m == nil || m.drop {
		e.added = append(e.added, addition{name, text})
		return
	}
	m.text = text
	e.keepOnly(name, m)
}

// Cut removes a member.
func (e *Editor) Cut(name string) { e.keepOnly(name, nil) }

// CutGiven removes all members of a name. If all are null they stay: engines read null
// as absent.
func (e *Editor) CutGiven(name string) {
	if e.IsSet(name) {
		e.Cut(name)
	}
}

// OnlyLast removes all members of a name except the last.
func (e *Editor) OnlyLast(name string) { e.keepOnly(name, e.last(name, false)) }

func (e *Editor) keepOnly(name string, stays *member) {
	for i := range e.members {
		if m := &e.members[i]; m != stays && e.is(m, name) {
			m.drop = true
		}
	}
}

// Drop removes the members of an object, or the elements of a list, for which drop returns true.
// Elements have no names.
func (e *Editor) Drop(drop func(name string, v Span) bool) {
	for i := range e.members {
		m, name := &e.members[i], ""
		if m.key != m.Start {
			name = View(e.keyOf(m))
		}
		m.drop = m.drop || drop(name, m.Span)
	}
}

// Changed returns whether an existing member was set or removed.
func (e *Editor) Changed(name string) bool {
	m := e.last(name, false)
	return m != nil && (m.drop || m.text != nil)
}

// Object returns an Editor for the value of the last member of a name that is not null. Its
// changes are made with this one's. A member that is absent or null is made once something is added
// to it. It is not ok if the value is something else, which the engine will refuse, or has too many
// members.
func (e *Editor) Object(name string) (in *Editor, ok bool) {
	for _, o := range e.within {
		if o.name == name {
			return o.Editor, true
		}
	}
	m := e.last(name, true)
	switch {
	case m == nil:
		in = &Editor{Body: e.Body}
	case m.First(e.Body) == '{':
		if in = EditAt(e.Body, m.Start, maxWithin); in == nil {
			return nil, false
		}
		e.keepOnly(name, m)
	default:
		return nil, false
	}
	e.within = append(e.within, object{name, in})
	return in, true
}

// Within returns an Editor for the object or list that opens at Body[at], within a value that does not
// change otherwise. Its changes are made with this one's. It is nil if there is too much in it.
func (e *Editor) Within(at int) *Editor {
	in := EditAt(e.Body, at, maxWithin)
	if in != nil {
		e.within = append(e.within, object{Editor: in})
	}
	return in
}

// Replace makes a change within a value that does not change otherwise, or between
// members.
func (e *Editor) Replace(edit Edit) { e.raw = append(e.raw, edit) }

// Apply returns a copy of the body with the changes made. It must be the last call.
func (e *Editor) Apply() []byte {
	return Splice(make([]byte, 0, len(e.Body)+256), e.Body, e.Edits())
}

// Edits returns the changes in order, without overlaps. It must be the last call.
func (e *Editor) Edits() []Edit {
	edits := e.appendTo(nil)
	slices.SortStableFunc(edits, func(a, b Edit) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End))
	})
	return edits
}

func (e *Editor) appendTo(edits []Edit) []Edit {
	edits = append(edits, e.raw...)
	for _, o := range e.within {
		if o.end != 0 {
			edits = o.appendTo(edits)
		} else {
			e.make(o)
		}
	}
	w := Object{} // More once a member stays
	for i := range e.members {
		m := &e.members[i]
		switch {
		case m.drop:
			edits = append(edits, Edit{Span: e.withComma(m, w.More)})
			continue
		case m.text != nil:
			edits = append(edits, Edit{Span: m.Span, Text: m.text})
		}
		w.More = true
	}
	at := Span{e.end, e.end}
	for _, a := range e.added {
		w.Buf = nil
		w.Name(a.name)
		edits = append(edits, Edit{Span: at, Text: w.Buf}, Edit{Span: at, Text: a.text})
	}
	return edits
}

// make sets a member that is a new object, if something was added to it.
func (e *Editor) make(o object) {
	for _, in := range o.within {
		o.make(in)
	}
	if len(o.added) == 0 {
		return
	}
	var w Object
	w.Open()
	for _, a := range o.added {
		w.Raw(a.name, a.text)
	}
	w.Close()
	e.Set(o.name, w.Buf)
}

// withComma returns what is cut out with a member: the comma before it, or behind
// it if no member before it stays.
func (e *Editor) withComma(m *member, behind bool) Span {
	s := Span{m.key, m.End}
	if behind {
		for s.Start--; e.Body[s.Start] != ','; s.Start-- { // white space
		}
		return s
	}
	if i := SkipSpace(e.Body, m.End); e.Body[i] == ',' {
		s.End = i + 1
	}
	return s
}
