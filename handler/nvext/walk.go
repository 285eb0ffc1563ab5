package nvext

import (
	"bytes"
	"unsafe"

	"github.com/tidwall/gjson"
)

// maxDepth is how deep arrays and objects may be nested.
const maxDepth = 256

// walk goes through the members of one object, or the elements of one array,
// where they stand. After next its owner must move on with value, or by
// setting i behind the value. It does not recurse, and allocates for keys with
// escapes only. What it skips is checked for matching brackets only.
type walk struct {
	b      []byte
	i      int // at the value, once next has returned true
	keyAt  int // at the key's opening quote
	keyEnd int // behind its closing one
	comma  int // before this member, -1 for the first
	shut   byte
	begun  bool
	done   bool // the closing bracket has been read; i is behind it
	bad    bool // malformed, or nested too deeply
}

// enter returns a walk over the object or array that opens at b[at].
func enter(b []byte, at int) walk {
	return walk{b: b, i: at + 1, shut: b[at] + 2} // '{'+2 is '}', as '['+2 is ']'
}

// next goes to the next value. It returns false when there is none.
func (w *walk) next() bool {
	if w.bad || w.done {
		return false
	}
	w.i, w.comma = skipSpace(w.b, w.i), -1
	if w.at(w.shut) {
		w.i++
		w.done = true
		return false
	}
	if w.begun {
		w.comma = w.i
		if !w.eat(',') {
			return false
		}
	}
	w.begun = true
	if w.shut == '}' {
		w.keyAt = w.i
		w.keyEnd = skipString(w.b, w.i)
		if w.keyEnd < 0 {
			w.bad = true
			return false
		}
		w.i = skipSpace(w.b, w.keyEnd)
		if !w.eat(':') {
			return false
		}
	}
	w.bad = w.i >= len(w.b)
	return !w.bad
}

// at tells whether c comes next.
func (w *walk) at(c byte) bool { return w.i < len(w.b) && w.b[w.i] == c }

// eat passes c, which must come next, and the space behind it.
func (w *walk) eat(c byte) bool {
	if !w.at(c) {
		w.bad = true
		return false
	}
	w.i = skipSpace(w.b, w.i+1)
	return true
}

// value passes the value and returns where it is.
func (w *walk) value() Span {
	at := w.i
	end, ok := skipValue(w.b, at)
	if !ok {
		w.bad = true
		return Span{}
	}
	w.i = end
	return Span{at, end}
}

// name returns the member's name, which points into b unless it has escapes.
func (w *walk) name() string {
	raw := w.b[w.keyAt+1 : w.keyEnd-1]
	if bytes.IndexByte(raw, '\\') < 0 {
		return view(raw)
	}
	return gjson.Parse(view(w.b[w.keyAt:w.keyEnd])).Str
}

// view returns b as a string without a copy. It is good while b is.
func view(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) //nolint:gosec // b is not changed meanwhile
}

// index returns where name is among names, -1 if it is not.
func index(names []string, name string) int {
	for i, n := range names {
		if n == name {
			return i
		}
	}
	return -1
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index behind the string at b[i], -1 if there is none
// or it does not end.
func skipString(b []byte, i int) int {
	if i >= len(b) || b[i] != '"' {
		return -1
	}
	for i++; i < len(b); i++ {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return -1
		}
		end := i + n
		// Backslashes before the quote pair up from the first of them on, and
		// none is looked at twice, as the search goes on behind this quote.
		first := end
		for first > i && b[first-1] == '\\' {
			first--
		}
		if (end-first)%2 == 0 {
			return end + 1
		}
		i = end
	}
	return -1
}

// skipValue returns the index behind the value at b[i]. The kinds of the
// brackets that are open are one bit each.
func skipValue(b []byte, i int) (end int, ok bool) {
	var objects [maxDepth / 64]uint64
	depth := 0
	for i < len(b) {
		switch c := b[i]; c {
		case '"':
			if i = skipString(b, i); i < 0 {
				return 0, false
			}
		case '{', '[':
			if depth == maxDepth {
				return i, false
			}
			bit := uint64(1) << (depth % 64)
			objects[depth/64] &^= bit
			if c == '{' {
				objects[depth/64] |= bit
			}
			depth++
			i++
			continue
		case '}', ']':
			depth--
			if depth < 0 || (objects[depth/64]>>(depth%64)&1 == 1) != (c == '}') {
				return i, false
			}
			i++
		default:
			at := i
			for i < len(b) && !ends[b[i]] {
				i++
			}
			if i == at { // a space, comma or colon
				if depth == 0 {
					return i, false
				}
				i++
				continue
			}
		}
		if depth == 0 {
			return i, true
		}
	}
	return i, false
}

// ends marks the bytes at which a number or a literal ends.
var ends = [256]bool{
	' ': true, '\n': true, '\t': true, '\r': true, ',': true, ':': true, '"': true,
	'{': true, '}': true, '[': true, ']': true,
}
