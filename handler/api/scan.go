package api

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"strconv"
)

// MaxDepth is how deep arrays and objects may be nested in a request body,
// counting the body's own object. Deeper bodies are not planned ([ErrDepth]).
const MaxDepth = 256

var (
	// ErrMalformed says that a body is not one JSON object with strings that
	// end and brackets that match.
	ErrMalformed = errors.New("malformed JSON")
	// ErrDepth says that a body nests deeper than MaxDepth.
	ErrDepth = errors.New("JSON nested too deeply")
	// ErrMembers says that a body has more than 4096 members.
	ErrMembers = errors.New("too many members")
)

// ScanError is what Parse returns for a body that it cannot read. It wraps
// ErrMalformed, ErrDepth or ErrMembers.
type ScanError struct {
	// Offset is the byte of the body at which reading stopped.
	Offset int
	err    error
}

// Error names the reason and the offset.
func (e *ScanError) Error() string {
	return e.err.Error() + " at byte " + strconv.Itoa(e.Offset)
}

// Unwrap returns ErrMalformed, ErrDepth or ErrMembers.
func (e *ScanError) Unwrap() error { return e.err }

// span is a part of a body: the bytes from start up to, not including, end.
// The zero span stands for a member that is absent.
type span struct{ start, end int }

func (s span) of(b []byte) []byte { return b[s.start:s.end] }

// first returns the first byte of the value, 0 for an absent one.
func (s span) first(b []byte) byte {
	if s.end <= s.start {
		return 0
	}
	return b[s.start]
}

// str returns what stands between a string's quotes, escapes and all; ok is
// false for a value that is no string.
func (s span) str(b []byte) (raw []byte, ok bool) {
	if s.first(b) != '"' {
		return nil, false
	}
	return b[s.start+1 : s.end-1], true
}

// maxKey is the length of the longest escaped key that is worth unescaping:
// longer than any key known here.
const maxKey = 32

// cursor walks the members of one object, or the elements of one array, where
// they stand. Between two calls of next its owner must move i past the value,
// with value or by entering it with another cursor. It does not allocate and
// does not recurse, and what it skips is checked for matching brackets only.
type cursor struct {
	b        []byte
	i        int
	depth    int // open brackets, counting this one
	keyAt    int // where the key's opening quote is
	keyEnd   int
	comma    int // where the comma before this member is, -1 for the first
	shut     byte
	started  bool
	err      error // ErrMalformed or ErrDepth; i is where
	finished bool  // the closing bracket has been read; i is behind it
	plain    bool  // the key is known to have no escapes
}

// enter returns a cursor over the object or array that opens at b[i].
func enter(b []byte, i, depth int) cursor {
	c := cursor{b: b, i: i + 1, depth: depth, shut: ']'}
	if b[i] == '{' {
		c.shut = '}'
	}
	return c
}

// next moves to the next value, and in an object reads its key. It returns
// false at the end (finished) and at an error (err).
func (c *cursor) next() bool {
	if c.err != nil || c.finished {
		return false
	}
	b := c.b
	i := skipSpace(b, c.i)
	if i >= len(b) {
		return c.fail(i)
	}
	c.comma = -1
	if b[i] == c.shut {
		c.i, c.finished = i+1, true
		return false
	}
	if c.started {
		if b[i] != ',' {
			return c.fail(i)
		}
		c.comma = i
		i = skipSpace(b, i+1)
	}
	c.started = true
	if c.shut == '}' {
		if i >= len(b) || b[i] != '"' {
			return c.fail(i)
		}
		end, plain := skipShort(b, i)
		if end < 0 {
			return c.fail(i)
		}
		c.keyAt, c.keyEnd, c.plain = i, end, plain
		i = skipSpace(b, end)
		if i >= len(b) || b[i] != ':' {
			return c.fail(i)
		}
		i = skipSpace(b, i+1)
	}
	if i >= len(b) {
		return c.fail(i)
	}
	c.i = i
	return true
}

// value skips the value that next has found and returns its span, the zero
// span if there is none.
func (c *cursor) value() span {
	at := c.i
	if c.b[at] == '"' {
		if end, _ := skipShort(c.b, at); end >= 0 {
			c.i = end
			return span{at, end}
		}
	}
	end, err := skipValue(c.b, at, c.depth)
	c.i = end
	if err != nil {
		c.err = err
		return span{}
	}
	return span{at, end}
}

// key returns the member's key, unescaped if it could be one that is known
// here. Only a key that is written with escapes, which no usual client does,
// costs an allocation.
func (c *cursor) key() []byte {
	raw := c.b[c.keyAt+1 : c.keyEnd-1]
	if c.plain || len(raw) > 6*maxKey || bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	return unescapeKey(raw)
}

func unescapeKey(raw []byte) []byte {
	out := make([]byte, 0, maxKey)
	r := runs{raw: raw}
	for p := r.next(); p != nil; p = r.next() {
		if len(out)+len(p) > maxKey {
			return raw
		}
		out = append(out, p...)
	}
	return out
}

func (c *cursor) fail(at int) bool {
	c.err, c.i = ErrMalformed, at
	return false
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// maxShort is up to where skipShort looks, in bytes: keys, ids, a token's text.
const maxShort = 48

// skipShort is skipString for strings that are likely short, like keys: it
// looks at their first bytes eight at a time, which saves the call to a search
// that only pays on longer ones. It also tells whether the string is known to
// have no escapes.
func skipShort(b []byte, i int) (end int, plain bool) {
	for j := i + 1; j+8 <= len(b) && j < i+maxShort; j += 8 {
		x := binary.LittleEndian.Uint64(b[j:])
		if m := bytesEqual(x, '"') | bytesEqual(x, '\\'); m != 0 {
			j += bits.TrailingZeros64(m) >> 3
			if b[j] != '"' {
				break
			}
			return j + 1, true
		}
	}
	return skipString(b, i), false
}

// skipString returns the index behind the string that opens at b[i], or -1 if
// it does not end. A quote ends it unless an odd number of backslashes stands
// before it; no backslash is counted for two quotes, so the time is linear.
func skipString(b []byte, i int) int {
	start := i + 1
	for j := start; ; j++ {
		k := bytes.IndexByte(b[j:], '"')
		if k < 0 {
			return -1
		}
		j += k
		n := j
		for n > start && b[n-1] == '\\' {
			n--
		}
		if (j-n)&1 == 0 {
			return j + 1
		}
	}
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// bytesEqual looks for c among the eight bytes of x. The lowest bit that is
// set is the high bit of the first c; there is none if there is no c.
func bytesEqual(x uint64, c byte) uint64 {
	x ^= ones * uint64(c)
	return (x - ones) &^ x & highs
}

// unstructured is whether the eight bytes of x are all below '[' and no
// quote: digits, commas and spaces, as in a long list of numbers.
func unstructured(x uint64) bool {
	const below = ones * (0x80 - '[')
	return ((x+below)|x)&highs|bytesEqual(x, '"') == 0
}

// structural marks the bytes at which something happens outside strings.
var structural = [256]bool{'"': true, '{': true, '}': true, '[': true, ']': true}

// skipValue returns the index behind the value at b[i], which stands inside
// depth open brackets. With an error the index is where it was found.
// The stack of open brackets is one bit for each, so that a body of nothing
// but brackets costs no memory and ends at MaxDepth.
func skipValue(b []byte, i, depth int) (int, error) {
	switch b[i] {
	case '"':
		end, _ := skipShort(b, i)
		if end < 0 {
			return i, ErrMalformed
		}
		return end, nil
	case '{', '[':
	default:
		return skipScalar(b, i)
	}
	var objects [MaxDepth / 64]uint64
	level := depth
	for i < len(b) {
		ch := b[i]
		if !structural[ch] {
			for i++; i+8 <= len(b) && unstructured(binary.LittleEndian.Uint64(b[i:])); {
				i += 8
			}
			continue
		}
		switch ch {
		case '"':
			end, _ := skipShort(b, i)
			if end < 0 {
				return i, ErrMalformed
			}
			i = end
			continue
		case '{', '[':
			if level >= MaxDepth {
				return i, ErrDepth
			}
			bit := uint64(1) << (level & 63)
			if ch == '{' {
				objects[level>>6] |= bit
			} else {
				objects[level>>6] &^= bit
			}
			level++
		default:
			level--
			if (objects[level>>6]>>(level&63)&1 == 1) != (ch == '}') {
				return i, ErrMalformed
			}
			if level == depth {
				return i + 1, nil
			}
		}
		i++
	}
	return i, ErrMalformed
}

// skipScalar passes a number or a literal. It is only delimited: whether
// "tru" or "1.2.3" means anything is the engine's business.
func skipScalar(b []byte, i int) (int, error) {
	at := i
	for i < len(b) && scalar[b[i]] {
		i++
	}
	if i == at {
		return i, ErrMalformed
	}
	return i, nil
}

// scalar marks the bytes that numbers and literals are made of, also those
// that only Python has (NaN, Infinity).
var scalar = func() (t [256]bool) {
	for _, c := range []byte("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		t[c] = true
	}
	return t
}()
