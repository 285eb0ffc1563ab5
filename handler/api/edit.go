package api

import (
	"cmp"
	"math"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// keptMembers is how many members of a body Parse remembers. Of larger bodies,
// which no usual client sends, an Editor looks for them again.
const keptMembers = 16

// place is where one member of an object is.
type place struct {
	key int // its key's opening quote
	rawjson.Span
}

// Editor collects changes of an object's members. All other bytes stay, and
// what was valid JSON stays so. Of members of one name the last counts, as it
// does for engines; a change of that one cuts out the others, lest a reader
// takes the first.
//
// Each name must be changed once at most. Names are found however they are
// escaped, if they have no more than 32 bytes.
type Editor struct {
	body    []byte
	end     int // where the object's closing bracket is
	members []place
	changes []change
	added   []addition
	raw     []rawjson.Edit
	objects []object
	within  []*Editor
	room    *int // for members of what is within; see roomWithin
}

// object is a member whose own members are changed.
type object struct {
	name string
	*Editor
	fresh bool // it was not there, or null
}

// change is what becomes of one member.
type change struct {
	member int
	drop   bool
	text   []byte // of the value, unless the member is dropped
}

type addition struct {
	name string
	text []byte
}

// Editor returns an Editor for the body that was parsed; nil for another one.
func (r *Request) Editor(body []byte) *Editor {
	if len(body) != r.size {
		return nil
	}
	if r.memberCount > keptMembers || r.size > math.MaxUint32 {
		return editObject(body, r.brace, nil)
	}
	e := &Editor{body: body, end: r.closing, members: make([]place, r.memberCount)}
	for i, m := range r.members[:r.memberCount] {
		e.members[i] = place{int(m[0]), rawjson.Span{Start: int(m[1]), End: int(m[2])}}
	}
	return e
}

// maxMembers and maxElements bound what is edited, and maxWithin the members of
// all objects within a body: no usual client sends more, and each costs more
// memory than it takes in the body.
const maxMembers, maxElements, maxWithin = 4096, 1024, 32 << 10

// roomWithin returns for how many members of objects within the body there is
// room, which all Editors of one body share.
func (e *Editor) roomWithin() *int {
	if e.room == nil {
		e.room = new(int)
		*e.room = maxWithin
	}
	return e.room
}

// editObject returns an Editor for the object that opens at body[at], which has
// been passed before; nil if it has too many members. Those of an object within
// another one take of the room.
func editObject(body []byte, at int, room *int) *Editor {
	e := &Editor{body: body, room: room}
	c := rawjson.Enter(body, at)
	for c.Next() {
		v := c.Value()
		if len(e.members) == maxMembers || room != nil && *room == 0 {
			return nil
		}
		if room != nil {
			*room--
		}
		e.members = append(e.members, place{c.KeyAt, v})
	}
	e.end = c.At - 1
	return e
}

// note remembers a member of the body.
func (r *Request) note(key int, v rawjson.Span) {
	if r.memberCount < keptMembers {
		r.members[r.memberCount] = [3]uint32{uint32(key), uint32(v.Start), uint32(v.End)}
	}
	r.memberCount++
}

// is tells whether a member has a name.
func (e *Editor) is(m place, name string) bool {
	end, _ := rawjson.SkipString(e.body, m.key)
	return string(rawjson.UnescapeKey(e.body[m.key+1:end-1])) == name
}

// last returns the position of the last member of a name, -1 if there is none.
func (e *Editor) last(name string) int {
	for i, m := range slices.Backward(e.members) {
		if e.is(m, name) {
			return i
		}
	}
	return -1
}

func (e *Editor) value(i int) []byte { return e.body[e.members[i].Start:e.members[i].End] }

// Value returns a member's value as it is written, nil if there is none.
func (e *Editor) Value(name string) []byte {
	if i := e.last(name); i >= 0 {
		return e.value(i)
	}
	return nil
}

// Set gives a member a value, which is JSON. One that is not there is added at
// the object's end.
func (e *Editor) Set(name string, text []byte) {
	i := e.last(name)
	if i < 0 {
		e.added = append(e.added, addition{name, text})
		return
	}
	e.changes = append(e.changes, change{member: i, text: text})
	e.dropBefore(name, i)
}

// Cut takes a member out.
func (e *Editor) Cut(name string) { e.dropBefore(name, len(e.members)) }

// dropBefore takes out the members of a name in front of a position.
func (e *Editor) dropBefore(name string, n int) {
	for i := range n {
		if e.is(e.members[i], name) {
			e.changes = append(e.changes, change{member: i, drop: true})
		}
	}
}

// Changed tells whether a member that is there was set or cut out.
func (e *Editor) Changed(name string) bool {
	i := e.last(name)
	return i >= 0 && slices.ContainsFunc(e.changes, func(c change) bool { return c.member == i })
}

// NVExt returns where the value of the nvext is that counts: that of the last
// member that is not null. It is not ok if there is none.
func (e *Editor) NVExt() (at rawjson.Span, ok bool) {
	for i, m := range slices.Backward(e.members) {
		if !e.members[i].IsNull(e.body) && e.is(m, nameNVExt) {
			return m.Span, true
		}
	}
	return at, false
}

// CutNVExt takes all nvext members out. If they are all null they stay, as
// engines take null for absent.
func (e *Editor) CutNVExt() {
	if _, ok := e.NVExt(); ok {
		e.Cut(nameNVExt)
	}
}

// OnlyNVExt takes all nvext members out but the one that counts, if there is
// one: for readers that know it, and refuse to read it twice.
func (e *Editor) OnlyNVExt() {
	at, ok := e.NVExt()
	if !ok {
		return
	}
	for i, m := range e.members {
		if m.Start != at.Start && e.is(m, nameNVExt) {
			e.changes = append(e.changes, change{member: i, drop: true})
		}
	}
}

const nameNVExt = "nvext"

// Object returns an Editor for the value of a member, whose changes are made
// with this one's. If the member is absent or null, it is made as soon as
// something is added to it. It is not ok if the value is something else: an
// engine will say what is wrong with it.
func (e *Editor) Object(name string) (in *Editor, ok bool) {
	for _, o := range e.objects {
		if o.name == name {
			return o.Editor, true
		}
	}
	i := e.last(name)
	switch {
	case i < 0 || e.members[i].IsNull(e.body):
		in = &Editor{body: e.body, room: e.roomWithin()}
	case e.value(i)[0] == '{':
		if in = editObject(e.body, e.members[i].Start, e.roomWithin()); in == nil {
			return nil, false
		}
		e.dropBefore(name, i)
		e.within = append(e.within, in)
	default:
		return nil, false
	}
	e.objects = append(e.objects, object{name, in, in.end == 0})
	return in, true
}

// Elements returns Editors for the objects in a member's list. It is not ok if
// the value is no list, has something else in it, or too much.
func (e *Editor) Elements(name string) (in []*Editor, ok bool) {
	i := e.last(name)
	if i < 0 || e.value(i)[0] != '[' {
		return nil, false
	}
	for v := range e.members[i].Elements(e.body) {
		if v.First(e.body) != '{' {
			return nil, false
		}
		one := editObject(e.body, v.Start, e.roomWithin())
		if one == nil || len(in) == maxElements {
			return nil, false
		}
		in = append(in, one)
	}
	e.dropBefore(name, i)
	e.within = append(e.within, in...)
	return in, true
}

// Replace makes a change within a value that is not changed otherwise, or
// between members.
func (e *Editor) Replace(edit rawjson.Edit) { e.raw = append(e.raw, edit) }

// Text returns a part of the body.
func (e *Editor) Text(s rawjson.Span) []byte { return e.body[s.Start:s.End] }

// Edits returns the changes in order, without overlaps. Nothing may be changed
// after it.
func (e *Editor) Edits() []rawjson.Edit {
	edits := e.appendTo(nil)
	slices.SortStableFunc(edits, func(a, b rawjson.Edit) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.End, b.End))
	})
	return edits
}

func (e *Editor) appendTo(edits []rawjson.Edit) []rawjson.Edit {
	e.makeObjects()
	edits = append(edits, e.raw...)
	for _, in := range e.within {
		edits = in.appendTo(edits)
	}
	slices.SortFunc(e.changes, func(a, b change) int { return cmp.Compare(a.member, b.member) })
	dropped := 0
	for _, c := range e.changes {
		m := e.members[c.member]
		if !c.drop {
			edits = append(edits, rawjson.Edit{Span: m.Span, Text: c.text})
			continue
		}
		edits = append(edits, rawjson.Edit{Span: e.withComma(m, c.member > dropped)})
		dropped++
	}
	at := rawjson.Span{Start: e.end, End: e.end}
	w := rawjson.Object{More: dropped < len(e.members)}
	for _, a := range e.added {
		w.Buf = nil
		w.Name(a.name)
		edits = append(edits, rawjson.Edit{Span: at, Text: w.Buf}, rawjson.Edit{Span: at, Text: a.text})
	}
	return edits
}

// makeObjects sets the members that are new objects.
func (e *Editor) makeObjects() {
	for _, o := range e.objects {
		if !o.fresh {
			continue
		}
		o.makeObjects()
		if len(o.added) == 0 {
			continue
		}
		var w rawjson.Object
		w.Open()
		for _, a := range o.added {
			w.Raw(a.name, a.text)
		}
		w.Close()
		e.Set(o.name, w.Buf)
	}
	e.objects = nil
}

// withComma returns what is cut out for a member: behind one that stays the
// comma before it goes, too, and where nothing stays before it the one behind
// it. So each takes exactly one, except where the object is left empty.
func (e *Editor) withComma(m place, behind bool) rawjson.Span {
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
