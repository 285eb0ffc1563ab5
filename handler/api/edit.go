package api

import (
	"cmp"
	"math"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// keptMembers is how many members of a body Parse remembers. An Editor searches
// larger bodies, which no usual client sends, again.
const keptMembers = 16

// maxMembers bounds the members of a body that are edited, maxWithin those of an
// object within it. Each costs more memory
// than it takes in the body.
const maxMembers, maxWithin = 4096, 256

const nameNVExt = "nvext"

// Editor collects changes of an object's members, at most one for each name. All
// other bytes stay, and valid JSON stays valid. If a name repeats, the last member
// counts, as for engines. A change of that one cuts out the others, because readers
// differ. Editors find escaped names, too, up to 32 bytes.
type Editor struct {
	body    []byte
	end     int // where the object's closing bracket is; 0 for a new object
	members []member
	added   []addition
	raw     []rawjson.Edit
	within  []object
}

type member struct {
	key int // its key's opening quote
	rawjson.Span
	text []byte // the new value; nil if it does not change
	drop bool
}

type addition struct {
	name string
	text []byte
}

// object is an object within the body whose members are changed.
type object struct {
	name string // the member's
	*Editor
}

// Editor returns an Editor for the body that was parsed; nil for another one.
func (r *Request) Editor(body []byte) *Editor {
	if len(body) != r.size {
		return nil
	}
	if r.memberCount > keptMembers || r.size > math.MaxUint32 {
		return editObject(body, r.brace, maxMembers)
	}
	e := &Editor{body: body, end: r.closing, members: make([]member, r.memberCount)}
	for i, m := range r.members[:r.memberCount] {
		e.members[i] = member{key: int(m[0]), Span: rawjson.Span{Start: int(m[1]), End: int(m[2])}}
	}
	return e
}

// Only returns the value of the body's only member of a name. It is not ok without one, and if there may be others:
// an Editor finds them.
func (r *Request) Only(body []byte, name string) (v rawjson.Span, ok bool) {
	if len(body) != r.size || r.memberCount > keptMembers || r.size > math.MaxUint32 {
		return v, false
	}
	for _, m := range r.members[:r.memberCount] {
		if string(keyAt(body, int(m[0]))) != name {
			continue
		}
		if ok {
			return v, false
		}
		v, ok = rawjson.Span{Start: int(m[1]), End: int(m[2])}, true
	}
	return v, ok
}

func (r *Request) note(key int, v rawjson.Span) {
	if r.memberCount < keptMembers {
		r.members[r.memberCount] = [3]uint32{uint32(key), uint32(v.Start), uint32(v.End)}
	}
	r.memberCount++
}

// editObject returns an Editor for the valid object at body[at]; nil if it has more
// than most members.
func editObject(body []byte, at, most int) *Editor {
	e := &Editor{body: body}
	c := rawjson.Enter(body, at)
	for c.Next() {
		v := c.Value()
		if len(e.members) == most {
			return nil
		}
		e.members = append(e.members, member{key: c.KeyAt, Span: v})
	}
	e.end = c.At - 1
	return e
}

// EditObject returns an Editor for a valid object; nil if it has too many members.
func EditObject(text []byte) *Editor { return editObject(text, 0, maxWithin) }

// keyAt returns the name of the member whose key's opening quote is body[at].
func keyAt(body []byte, at int) []byte {
	end, _ := rawjson.SkipString(body, at)
	return rawjson.UnescapeKey(body[at+1 : end-1])
}

func (e *Editor) is(m *member, name string) bool { return string(keyAt(e.body, m.key)) == name }

// last returns the last member of a name, nil if there is none.
func (e *Editor) last(name string) *member {
	for i := len(e.members) - 1; i >= 0; i-- {
		if m := &e.members[i]; e.is(m, name) {
			return m
		}
	}
	return nil
}

// Value returns a member's value as it is written, nil if there is none.
func (e *Editor) Value(name string) []byte {
	if m := e.last(name); m != nil {
		return m.Of(e.body)
	}
	return nil
}

// IsSet returns whether any member of a name has a value that is not null.
func (e *Editor) IsSet(name string) bool {
	return slices.ContainsFunc(e.members, func(m member) bool { return !m.IsNull(e.body) && e.is(&m, name) })
}

// Set gives a member a value, which is JSON. It adds a new member at the object's
// end.
func (e *Editor) Set(name string, text []byte) {
	m := e.last(name)
	if m == nil {
		e.added = append(e.added, addition{name, text})
		return
	}
	m.text = text
	e.keepOnly(name, m)
}

// Cut removes a member.
func (e *Editor) Cut(name string) { e.keepOnly(name, nil) }

func (e *Editor) keepOnly(name string, stays *member) {
	for i := range e.members {
		if m := &e.members[i]; m != stays && e.is(m, name) {
			m.drop = true
		}
	}
}

// Changed returns whether an existing member was set or removed.
func (e *Editor) Changed(name string) bool {
	m := e.last(name)
	return m != nil && (m.drop || m.text != nil)
}

func (e *Editor) nvext() *member {
	for i := len(e.members) - 1; i >= 0; i-- {
		if m := &e.members[i]; !m.IsNull(e.body) && e.is(m, nameNVExt) {
			return m
		}
	}
	return nil
}

// NVExt returns the value of the nvext that counts: that of the last member that is
// not null. It is not ok if there is none.
func (e *Editor) NVExt() (at rawjson.Span, ok bool) {
	if m := e.nvext(); m != nil {
		return m.Span, true
	}
	return at, false
}

// CutNVExt removes all nvext members. If all are null they stay: engines read null
// as absent.
func (e *Editor) CutNVExt() {
	if e.nvext() != nil {
		e.Cut(nameNVExt)
	}
}

// OnlyNVExt removes all nvext members except the one that counts, for readers that
// refuse repeated names.
func (e *Editor) OnlyNVExt() {
	if m := e.nvext(); m != nil {
		e.keepOnly(nameNVExt, m)
	}
}

// Object returns an Editor for the value of a member, whose changes are made with
// this one's. An absent or null member is made once something is added to it. It is
// not ok if the value is something else, which the engine will refuse.
func (e *Editor) Object(name string) (in *Editor, ok bool) {
	for _, o := range e.within {
		if o.name == name {
			return o.Editor, true
		}
	}
	m := e.last(name)
	switch {
	case m == nil || m.IsNull(e.body):
		in = &Editor{body: e.body}
	case m.First(e.body) == '{':
		if in = editObject(e.body, m.Start, maxWithin); in == nil {
			return nil, false
		}
		e.keepOnly(name, m)
	default:
		return nil, false
	}
	e.within = append(e.within, object{name, in})
	return in, true
}

// Replace makes a change within a value that does not change otherwise, or between
// members.
func (e *Editor) Replace(edit rawjson.Edit) { e.raw = append(e.raw, edit) }

// Text returns a part of the body.
func (e *Editor) Text(s rawjson.Span) []byte { return e.body[s.Start:s.End] }

// Apply returns a copy of the body with the changes made. It must be the last call.
func (e *Editor) Apply() []byte {
	return rawjson.Splice(make([]byte, 0, len(e.body)+256), e.body, e.Edits())
}

// Edits returns the changes in order, without overlaps. It must be the last call.
func (e *Editor) Edits() []rawjson.Edit {
	edits := e.appendTo(nil)
	slices.SortStableFunc(edits, func(a, b rawjson.Edit) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End))
	})
	return edits
}

func (e *Editor) appendTo(edits []rawjson.Edit) []rawjson.Edit {
	edits = append(edits, e.raw...)
	for _, o := range e.within {
		if o.end != 0 {
			edits = o.appendTo(edits)
		} else {
			e.make(o)
		}
	}
	w := rawjson.Object{} // More once a member stays
	for i := range e.members {
		m := &e.members[i]
		switch {
		case m.drop:
			edits = append(edits, rawjson.Edit{Span: e.withComma(m, w.More)})
			continue
		case m.text != nil:
			edits = append(edits, rawjson.Edit{Span: m.Span, Text: m.text})
		}
		w.More = true
	}
	at := rawjson.Span{Start: e.end, End: e.end}
	for _, a := range e.added {
		w.Buf = nil
		w.Name(a.name)
		edits = append(edits, rawjson.Edit{Span: at, Text: w.Buf}, rawjson.Edit{Span: at, Text: a.text})
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
	var w rawjson.Object
	w.Open()
	for _, a := range o.added {
		w.Raw(a.name, a.text)
	}
	w.Close()
	e.Set(o.name, w.Buf)
}

// withComma returns what is cut out with a member: the comma before it, or behind
// it if no member before it stays.
func (e *Editor) withComma(m *member, behind bool) rawjson.Span {
	s := rawjson.Span{Start: m.key, End: m.End}
	if behind {
		for s.Start--; e.body[s.Start] != ','; s.Start-- { // white space
		}
		return s
	}
	if i := rawjson.SkipSpace(e.body, m.End); e.body[i] == ',' {
		s.End = i + 1
	}
	return s
}
