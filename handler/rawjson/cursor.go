// Package rawjson reads and edits JSON by position, in the original bytes. A
// [Cursor] walks objects and lists, a [Span] is a part of the bytes, an [Edit]
// changes one, and [Splice] makes the changes. A [Framer] cuts a stream of
// server-sent events into [Frame]s.
//
// The package does not decode, validate or reformat JSON: it checks that
// strings end and that brackets match. It knows no API and no field names, and
// imports neither Caddy nor net/http.
package rawjson

import (
	"bytes"
	"errors"
	"iter"
)

// MaxDepth is the deepest nesting of arrays and objects that is read, counting
// the outermost. Deeper values are an error ([ErrDepth]).
const MaxDepth = 256

var (
	// ErrMalformed means that a string does not end, that brackets do not match,
	// or that a byte is in the wrong place.
	ErrMalformed = errors.New("malformed JSON")
	// ErrDepth means that a value nests deeper than MaxDepth.
	ErrDepth = errors.New("JSON nested too deeply")
)

// Span is a part of some bytes: from Start up to, not including, End. The zero
// Span stands for a value that is absent.
type Span struct{ Start, End int }

// Of returns the span's bytes.
func (s Span) Of(b []byte) []byte { return b[s.Start:s.End] }

// Len returns the span's length in bytes.
func (s Span) Len() int { return s.End - s.Start }

// Within converts a span of this span's bytes to one of the bytes around it.
func (s Span) Within(in Span) Span { return Span{s.Start + in.Start, s.Start + in.End} }

// First returns the value's first byte, 0 for an absent value.
func (s Span) First(b []byte) byte {
	if s.End <= s.Start {
		return 0
	}
	return b[s.Start]
}

// Str returns the bytes between a string's quotes, with escapes as they are
// written. It is not ok if the value is no string.
func (s Span) Str(b []byte) (raw []byte, ok bool) {
	if s.First(b) != '"' {
		return nil, false
	}
	return b[s.Start+1 : s.End-1], true
}

// Text returns a string's text, "" for a value that is no string. The text may
// point into b.
func (s Span) Text(b []byte) string {
	raw, _ := s.Str(b)
	return Text(raw)
}

// IsNull returns whether a value is null.
func (s Span) IsNull(b []byte) bool { return string(s.Of(b)) == "null" }

// HasContent returns whether a value is neither absent, null nor empty.
func (s Span) HasContent(b []byte) bool {
	switch s.First(b) {
	case '[', '{':
		return SkipSpace(b, s.Start+1) < s.End-1
	case '"':
		return s.Len() > 2
	}
	return s.End > s.Start && !s.IsNull(b)
}

// Elements yields the elements of a list, up to the first malformed one. Other
// values have none.
func (s Span) Elements(b []byte) iter.Seq[Span] {
	return func(yield func(Span) bool) {
		if s.First(b) != '[' {
			return
		}
		for c := Enter(b, s.Start); c.Next(); {
			if v := c.Value(); c.Err != nil || !yield(v) {
				return
			}
		}
	}
}

// Objects is Elements for those elements that are objects.
func (s Span) Objects(b []byte) iter.Seq[Span] {
	return func(yield func(Span) bool) {
		for v := range s.Elements(b) {
			if b[v.Start] == '{' && !yield(v) {
				return
			}
		}
	}
}

// Members yields the members of an object, with their keys, up to the first malformed one. Other
// values have none. A key is as Cursor.Key returns it.
func (s Span) Members(b []byte) iter.Seq2[[]byte, Span] {
	return func(yield func([]byte, Span) bool) {
		if s.First(b) != '{' {
			return
		}
		for c := Enter(b, s.Start); c.Next(); {
			key := c.Key()
			if v := c.Value(); c.Err != nil || !yield(key, v) {
				return
			}
		}
	}
}

// Get returns the value of an object's member, the zero Span if there is none
// or the value is no object. Of members of one name the last counts.
func (s Span) Get(b []byte, name string) (v Span) {
	s.Read(b, To(name, &v))
	return v
}

// Field is where Read and ReadAt put the value of a member.
type Field struct {
	name string
	to   *Span
}

// To returns the Field that puts the value of the members of a name into v.
func To(name string, v *Span) Field { return Field{name, v} }

// Read finds members of an object. Of several that have one Span the last
// counts. It returns false, and may have found some, if the value is no object
// or is malformed.
func (s Span) Read(b []byte, fields ...Field) bool {
	return s.First(b) == '{' && ReadAt(b, s.Start, fields...) >= 0
}

// ReadAt is Read for the object that opens at b[i]. It returns the index behind
// the object, -1 if that is malformed.
func ReadAt(b []byte, i int, fields ...Field) (end int) {
	c := Enter(b, i)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		for _, f := range fields {
			if string(key) == f.name {
				*f.to = v
				break
			}
		}
	}
	if c.Err != nil {
		return -1
	}
	return c.At
}

// maxKey is the length of the longest key that is unescaped, in bytes. No known key
// is longer.
const maxKey = 32

// Cursor walks the members of one object, or the elements of one list. Between two
// calls of Next its owner must move At behind the value, with Value or by entering
// the value with another Cursor. A Cursor does not recurse, and allocates only for
// keys with escapes.
type Cursor struct {
	At     int   // of the value, once Next has returned true; behind the closing bracket at the end
	KeyAt  int   // of the key's opening quote
	KeyEnd int   // behind the key's closing quote
	Empty  bool  // Next has found no member yet
	Done   bool  // the closing bracket has been read
	Err    error // ErrMalformed or ErrDepth; At is where

	b     []byte
	depth int // open brackets, counting this one
	shut  byte
	plain bool // the key is known to have no escapes
}

// Enter returns a Cursor over the object or list that opens at b[i].
func Enter(b []byte, i int) Cursor {
	return Cursor{b: b, At: i + 1, depth: 1, shut: b[i] + 2, Empty: true} // '{'+2 is '}', as '['+2 is ']'
}

// byteOrderMark is that of UTF-8. Some clients begin with it, and engines in Python skip it.
var byteOrderMark = []byte("\xef\xbb\xbf")

// Document returns where the value in b begins, behind white space and a byte order mark.
func Document(b []byte) Span {
	i := 0
	if bytes.HasPrefix(b, byteOrderMark) {
		i = len(byteOrderMark)
	}
	return Span{SkipSpace(b, i), len(b)}
}

// Open returns a Cursor over the object in b, see Document. It is not ok if b begins with
// something else.
func Open(b []byte) (c Cursor, ok bool) {
	s := Document(b)
	if s.First(b) != '{' {
		return Cursor{At: s.Start, Err: ErrMalformed}, false
	}
	return Enter(b, s.Start), true
}

// Alone returns whether the object or list has been read to its end, and only white
// space follows.
func (c *Cursor) Alone() bool { return c.Done && SkipSpace(c.b, c.At) == len(c.b) }

// Next moves to the next value, and in an object reads its key. It returns
// false at the end (Done) and at an error (Err).
func (c *Cursor) Next() bool {
	if c.Err != nil || c.Done {
		return false
	}
	b := c.b
	i := SkipSpace(b, c.At)
	if i >= len(b) {
		return c.fail(i)
	}
	if b[i] == c.shut {
		c.At, c.Done = i+1, true
		return false
	}
	if !c.Empty {
		if b[i] != ',' {
			return c.fail(i)
		}
		i = SkipSpace(b, i+1)
	}
	c.Empty = false
	if c.shut == '}' {
		if i >= len(b) || b[i] != '"' {
			return c.fail(i)
		}
		end, plain := SkipString(b, i)
		if end < 0 {
			return c.fail(i)
		}
		c.KeyAt, c.KeyEnd, c.plain = i, end, plain
		i = SkipSpace(b, end)
		if i >= len(b) || b[i] != ':' {
			return c.fail(i)
		}
		i = SkipSpace(b, i+1)
	}
	if i >= len(b) {
		return c.fail(i)
	}
	c.At = i
	return true
}

// Value skips the value that Next has found and returns its Span, the zero Span
// if it is malformed.
func (c *Cursor) Value() Span {
	at := c.At
	if c.b[at] == '"' {
		if end, _ := SkipString(c.b, at); end >= 0 {
			c.At = end
			return Span{at, end}
		}
	}
	end, err := skipValue(c.b, at, c.depth)
	c.At = end
	if err != nil {
		c.Err = err
		return Span{}
	}
	return Span{at, end}
}

// Key returns the member's key, see unescapeKey. A key with escapes costs an
// allocation.
func (c *Cursor) Key() []byte {
	raw := c.b[c.KeyAt+1 : c.KeyEnd-1]
	if c.plain {
		return raw
	}
	return unescapeKey(raw)
}

// unescapeKey unescapes a key, given between its quotes. It returns a key that is
// longer than any known one unchanged.
func unescapeKey(raw []byte) []byte {
	if len(raw) > 6*maxKey || bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	return AppendText(make([]byte, 0, maxKey), raw)
}

func (c *Cursor) fail(at int) bool {
	c.Err, c.At = ErrMalformed, at
	return false
}
