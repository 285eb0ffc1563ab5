package rawjson

import (
	"bytes"
	"encoding/hex"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"
)

// Runs yields the text of a JSON string in pieces and without a copy. The string
// is Raw, without its quotes. Stretches between escapes come as they are, and
// each escape comes unescaped. A lone surrogate and a broken \u become U+FFFD,
// another unknown escape becomes the character behind its backslash.
type Runs struct {
	Raw []byte // what is left of it
	buf [utf8.UTFMax]byte
}

// Next returns the next piece, never an empty one, or nil at the end. A piece
// is good until the next call.
func (r *Runs) Next() []byte {
	if len(r.Raw) == 0 {
		return nil
	}
	if r.Raw[0] != '\\' {
		j := bytes.IndexByte(r.Raw, '\\')
		if j < 0 {
			j = len(r.Raw)
		}
		p := r.Raw[:j]
		r.Raw = r.Raw[j:]
		return p
	}
	n, used := Unescape(r.Raw, &r.buf)
	r.Raw = r.Raw[used:]
	return r.buf[:n]
}

// Unescape decodes the escape that s begins with into buf and returns how
// many bytes it wrote and how many of s it used.
func Unescape(s []byte, buf *[utf8.UTFMax]byte) (n, used int) {
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
	if len(s) >= 12 && s[6] == '\\' && s[7] == 'u' {
		low, ok := hex4(s[6:])
		if c = utf16.DecodeRune(c, low); ok && c != utf8.RuneError {
			return utf8.EncodeRune(buf[:], c), 12
		}
	}
	return utf8.EncodeRune(buf[:], utf8.RuneError), 6
}

// hex4 reads the four digits of the \uXXXX that s begins with.
func hex4(s []byte) (r rune, ok bool) {
	var n [2]byte
	if len(s) < 6 {
		return 0, false
	}
	_, err := hex.Decode(n[:], s[2:6])
	return rune(n[0])<<8 | rune(n[1]), err == nil
}

// Text returns a JSON string's text, given between its quotes. The text points
// into raw if that has no escapes.
func Text(raw []byte) string {
	if bytes.IndexByte(raw, '\\') < 0 {
		return View(raw)
	}
	return View(AppendText(make([]byte, 0, len(raw)), raw))
}

// AppendText appends a JSON string's text, given between its quotes.
func AppendText(dst, raw []byte) []byte {
	r := Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		dst = append(dst, p...)
	}
	return dst
}

// View returns b as a string without a copy, which is good while b does not
// change.
func View(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) //nolint:gosec // see above
}
