package api

import (
	"bytes"
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// runs yields the text of a JSON string (what stands between its quotes) in
// pieces, without a copy: the stretches between escapes as they are, and each
// escape unescaped. A lone surrogate and a broken \u become U+FFFD, another
// unknown escape the character behind its backslash.
type runs struct {
	raw []byte
	buf [utf8.UTFMax]byte
}

// next returns the next piece, never an empty one, or nil at the end. A piece
// is good until the next call.
func (r *runs) next() []byte {
	if len(r.raw) == 0 {
		return nil
	}
	if r.raw[0] != '\\' {
		j := bytes.IndexByte(r.raw, '\\')
		if j < 0 {
			j = len(r.raw)
		}
		p := r.raw[:j]
		r.raw = r.raw[j:]
		return p
	}
	n, used := unescape(r.raw, &r.buf)
	r.raw = r.raw[used:]
	return r.buf[:n]
}

// unescape decodes the escape that s begins with into buf and returns how
// many bytes it wrote and how many of s it used.
func unescape(s []byte, buf *[utf8.UTFMax]byte) (n, used int) {
	if len(s) < 2 {
		buf[0] = '\\'
		return 1, len(s)
	}
	if s[1] == 'u' {
		return unescapeUnicode(s, buf)
	}
	buf[0] = unescaped[s[1]]
	return 1, 2
}

// unescaped is what a backslash before a byte makes of it.
var unescaped = func() (t [256]byte) {
	for i := range t {
		t[i] = byte(i)
	}
	t['n'], t['t'], t['r'], t['b'], t['f'] = '\n', '\t', '\r', '\b', '\f'
	return t
}()

func unescapeUnicode(s []byte, buf *[utf8.UTFMax]byte) (n, used int) {
	c, ok := hex4(s)
	if !ok {
		return utf8.EncodeRune(buf[:], utf8.RuneError), 2
	}
	if c < 0xD800 || c > 0xDFFF {
		return utf8.EncodeRune(buf[:], c), 6
	}
	if c < 0xDC00 && len(s) >= 12 && s[6] == '\\' && s[7] == 'u' {
		if low, ok := hex4(s[6:]); ok && low >= 0xDC00 && low <= 0xDFFF {
			return utf8.EncodeRune(buf[:], 0x10000+(c-0xD800)<<10+(low-0xDC00)), 12
		}
	}
	return utf8.EncodeRune(buf[:], utf8.RuneError), 6
}

// hex4 reads the four digits of the \uXXXX that s begins with.
func hex4(s []byte) (r rune, ok bool) {
	if len(s) < 6 {
		return 0, false
	}
	for _, c := range s[2:6] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// textLen returns how many bytes a JSON string has once unescaped.
func textLen(raw []byte) (n int64) {
	r := runs{raw: raw}
	for p := r.next(); p != nil; p = r.next() {
		n += int64(len(p))
	}
	return n
}

// text returns a JSON string's text. It points into raw if that has no
// escapes, for the body lives as long as the request that was read from it.
func text(raw []byte) string {
	if len(raw) == 0 {
		return ""
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return view(raw)
	}
	out := make([]byte, 0, len(raw))
	r := runs{raw: raw}
	for p := r.next(); p != nil; p = r.next() {
		out = append(out, p...)
	}
	return view(out)
}

// view is b as a string without a copy; b must not change afterwards.
func view(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) //nolint:gosec // bodies are read-only once read
}

// compact yields a JSON value without the whitespace outside its strings, in
// pieces that point into it.
type compact struct{ raw []byte }

// next returns the next piece, never an empty one, or nil at the end.
func (c *compact) next() []byte {
	b := c.raw
	at := skipSpace(b, 0)
	for i := at; i < len(b); {
		switch b[i] {
		case '"':
			end := skipString(b, i)
			if end < 0 {
				end = len(b)
			}
			i = end
		case ' ', '\n', '\t', '\r':
			c.raw = b[i:]
			return b[at:i]
		default:
			i++
		}
	}
	c.raw = nil
	if at == len(b) {
		return nil
	}
	return b[at:]
}

// integer reads a JSON number that is a whole one, also when it is written as
// 1e3 or 5.0.
func integer(b []byte) (int64, bool) {
	if len(b) == 0 || b[0] != '-' && (b[0] < '0' || b[0] > '9') {
		return 0, false
	}
	s := view(b)
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f != float64(int64(f)) || f >= 1<<63 || f < -1<<63 {
		return 0, false
	}
	return int64(f), true
}
