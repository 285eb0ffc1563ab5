package api

import (
	"bytes"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// arguments writes the text of a tool call's arguments, which comes in pieces.
// One API's clients send it as a string, another's as an object, and both
// write it anew: so of a text that begins as an object the whitespace outside
// strings is left out and escapes within are resolved, as AddJSON does it.
// Another text (a custom tool's input) is written as it is, but for
// whitespace at its beginning.
type arguments struct {
	mode argMode
	n    int      // bytes in esc
	esc  [12]byte // an escape that is not whole yet
}

type argMode uint8

const (
	argsBegin argMode = iota
	argsPlain
	argsJSON   // outside strings
	argsString // inside one
)

// begun is whether anything has been written.
func (w *arguments) begun() bool { return w.mode != argsBegin }

// add writes the next piece, in which no escapes of an outer string are left.
func (w *arguments) add(h *Hasher, p []byte) {
	for len(p) > 0 {
		switch w.mode {
		case argsBegin:
			p = p[rawjson.SkipSpace(p, 0):]
			if len(p) > 0 && p[0] == '{' {
				w.mode = argsJSON
			} else if len(p) > 0 {
				w.mode = argsPlain
			}
		case argsPlain:
			h.Add(p)
			return
		case argsJSON:
			p = w.outside(h, p)
		case argsString:
			if w.n > 0 {
				p = w.escape(h, p)
			} else {
				p = w.inside(h, p)
			}
		}
	}
}

// addString writes the next piece, given as it stands between the quotes of a
// JSON string.
func (w *arguments) addString(h *Hasher, raw []byte) {
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		w.add(h, p)
	}
}

func (w *arguments) outside(h *Hasher, p []byte) []byte {
	for i, c := range p {
		switch c {
		case '"':
			w.mode = argsString
			h.Add(p[:i+1])
			return p[i+1:]
		case ' ', '\n', '\t', '\r':
			h.Add(p[:i])
			return p[rawjson.SkipSpace(p, i):]
		}
	}
	h.Add(p)
	return nil
}

func (w *arguments) inside(h *Hasher, p []byte) []byte {
	for i, c := range p {
		switch c {
		case '"':
			w.mode = argsJSON
			h.Add(p[:i+1])
			return p[i+1:]
		case '\\':
			h.Add(p[:i])
			w.esc[0], w.n = '\\', 1
			return p[i+1:]
		}
	}
	h.Add(p)
	return nil
}

// escape takes one more byte of an escape, and writes it once it is whole.
func (w *arguments) escape(h *Hasher, p []byte) []byte {
	w.esc[w.n] = p[0]
	w.n++
	if settled(w.esc[:w.n]) {
		esc, n := w.esc, w.n
		w.n = 0
		var buf [utf8.UTFMax]byte
		m, used := rawjson.Unescape(esc[:n], &buf)
		h.addRune(buf[:m])
		w.add(h, esc[used:n])
	}
	return p[1:]
}

// settled is whether no byte that may follow would change what unescape makes
// of s.
func settled(s []byte) bool {
	if len(s) < 2 {
		return false
	}
	if s[1] != 'u' {
		return true
	}
	for _, c := range s[2:min(len(s), 6)] {
		if !isHex(c) {
			return true
		}
	}
	if len(s) < 6 {
		return false
	}
	if c, _ := rawjson.Hex4(s); c < 0xD800 || c > 0xDBFF {
		return true
	}
	for i, c := range s[6:] { // the other half of the pair, or not
		if i == 0 && c != '\\' || i == 1 && c != 'u' || i > 1 && !isHex(c) {
			return true
		}
	}
	return len(s) == 12
}

func isHex(c byte) bool {
	return c-'0' <= 9 || c|0x20-'a' <= 5
}

// AddJSON appends a JSON value without the whitespace outside its strings and
// with the escapes in them resolved, so that clients which spell one value
// differently have one text.
func (h *Hasher) AddJSON(raw []byte) {
	at := rawjson.SkipSpace(raw, 0)
	for i := at; i < len(raw); {
		switch raw[i] {
		case '"':
			end, plain := rawjson.SkipString(raw, i)
			if end < 0 {
				end = len(raw)
			}
			if !plain && bytes.IndexByte(raw[i:end], '\\') >= 0 {
				h.Add(raw[at : i+1])
				h.AddString(raw[i+1 : max(end-1, i+1)])
				at = max(end-1, i+1)
			}
			i = end
		case ' ', '\n', '\t', '\r':
			h.Add(raw[at:i])
			i = rawjson.SkipSpace(raw, i)
			at = i
		default:
			i++
		}
	}
	h.Add(raw[min(at, len(raw)):])
}
