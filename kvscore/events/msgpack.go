package events

import (
	"encoding/binary"
	"math"
)

// Lead bytes of msgpack values, see https://github.com/msgpack/msgpack/blob/master/spec.md.
const (
	fixMap   = 0x80
	fixArray = 0x90
	fixStr   = 0xa0
	null     = 0xc0
	unused   = 0xc1
	bin8     = 0xc4
	bin32    = 0xc6
	float32b = 0xca
	float64b = 0xcb
	uint8b   = 0xcc
	uint16b  = 0xcd
	uint32b  = 0xce
	uint64b  = 0xcf
	int8b    = 0xd0
	int64b   = 0xd3
	str8     = 0xd9
	str32    = 0xdb
	array16  = 0xdc
	array32  = 0xdd
	map16    = 0xde
	map32    = 0xdf
	negative = 0xe0
)

// reader reads msgpack values at a position. Each method that fails returns false and may
// leave the position inside of a value.
//
// It replaces the functions of tinylib/msgp, which need 15 ns for a token where reader needs 6.
// They also allocate for an error, and skip nested values by recursion, 100,000 deep.
type reader struct {
	b []byte
	i int
}

// lead returns the first byte of the next value, or unused at the end.
func (r *reader) lead() byte {
	if r.i >= len(r.b) {
		return unused
	}
	return r.b[r.i]
}

// number reads size bytes as a big-endian number.
func (r *reader) number(size int) (v uint64, ok bool) {
	if len(r.b)-r.i < size {
		return 0, false
	}
	for _, c := range r.b[r.i : r.i+size] {
		v = v<<8 | uint64(c)
	}
	r.i += size
	return v, true
}

// bytes reads n bytes. They alias the payload.
func (r *reader) bytes(n uint64) ([]byte, bool) {
	if n > uint64(len(r.b)-r.i) {
		return nil, false
	}
	end := r.i + int(n)
	b := r.b[r.i:end:end]
	r.i = end
	return b, true
}

// array reads the header of an array and returns the number of its elements, at most the
// number of bytes that are left.
func (r *reader) array() (int, bool) {
	return r.header(fixArray, array16, 1)
}

// mapping reads the header of a map and returns the number of its pairs, at most half the
// number of bytes that are left.
func (r *reader) mapping() (int, bool) {
	return r.header(fixMap, map16, 2)
}

func (r *reader) header(fix, wide byte, values uint64) (int, bool) {
	c := r.lead()
	n := uint64(c & 15)
	switch {
	case c&0xf0 == fix:
		r.i++
	case c == wide || c == wide+1:
		r.i++
		var ok bool
		if n, ok = r.number(2 << (c - wide)); !ok {
			return 0, false
		}
	default:
		return 0, false
	}
	return int(n), n*values <= uint64(len(r.b)-r.i)
}

// isText reports whether a value is a string or bytes, by its lead byte.
func isText(c byte) bool {
	return c >= fixStr && c < null || c >= str8 && c <= str32 || isBytes(c)
}

func isBytes(c byte) bool { return c >= bin8 && c <= bin32 }

func isArray(c byte) bool { return c >= fixArray && c < fixStr || c == array16 || c == array32 }

func isMap(c byte) bool { return c >= fixMap && c < fixArray || c == map16 || c == map32 }

func isInteger(c byte) bool { return c < fixMap || c >= uint8b && c <= int64b || c >= negative }

// text reads a string or bytes.
func (r *reader) text() ([]byte, bool) {
	c := r.lead()
	if !isText(c) {
		return nil, false
	}
	r.i++
	if c < null {
		return r.bytes(uint64(c & 31))
	}
	base := byte(str8)
	if isBytes(c) {
		base = bin8
	}
	n, ok := r.number(1 << (c - base))
	if !ok {
		return nil, false
	}
	return r.bytes(n)
}

// optional reads a string, bytes or null. It returns nil for null.
func (r *reader) optional() ([]byte, bool) {
	if r.null() {
		return nil, true
	}
	return r.text()
}

// null skips a null and reports whether there was one.
func (r *reader) null() bool {
	if r.lead() != null {
		return false
	}
	r.i++
	return true
}

// integer reads an integer of any width. Negative ones are returned in two's complement.
func (r *reader) integer() (v uint64, minus, ok bool) {
	c := r.lead()
	if !isInteger(c) {
		return 0, false, false
	}
	r.i++
	switch {
	case c < fixMap:
		return uint64(c), false, true
	case c >= negative:
		return uint64(int64(int8(c))), true, true
	case c <= uint64b:
		v, ok = r.number(1 << (c - uint8b))
		return v, false, ok
	}
	size := 1 << (c - int8b)
	v, ok = r.number(size)
	shift := 64 - 8*size
	v = uint64(int64(v<<shift) >> shift)
	return v, int64(v) < 0, ok
}

// hash reads a block's name: an integer, signed or not, or bytes, of which the last 8 count.
func (r *reader) hash() (uint64, bool) {
	if len(r.b)-r.i >= 9 && r.b[r.i] == uint64b {
		v := binary.BigEndian.Uint64(r.b[r.i+1:])
		r.i += 9
		return v, true
	}
	if !isBytes(r.lead()) {
		v, _, ok := r.integer()
		return v, ok
	}
	digest, ok := r.text()
	if !ok || len(digest) == 0 {
		return 0, false
	}
	var v uint64
	for _, c := range digest[max(0, len(digest)-8):] {
		v = v<<8 | uint64(c)
	}
	return v, true
}

// seconds reads a number as a time; 0 if it is no finite number.
func (r *reader) seconds() (t float64, ok bool) {
	c := r.lead()
	switch {
	case c == float64b || c == float32b:
		r.i++
		var bits uint64
		if c == float64b {
			bits, ok = r.number(8)
			t = math.Float64frombits(bits)
		} else {
			bits, ok = r.number(4)
			t = float64(math.Float32frombits(uint32(bits)))
		}
	case isInteger(c):
		var v uint64
		v, _, ok = r.integer()
		t = float64(int64(v))
	default:
		return 0, r.skip()
	}
	if math.IsNaN(t) || math.IsInf(t, 0) {
		t = 0
	}
	return t, ok
}

// skip skips one value. It needs no stack, however deep values are nested.
func (r *reader) skip() bool {
	for open := uint64(1); open > 0; open-- {
		left := len(r.b) - r.i
		if uint64(max(left, 0)) < open {
			return false
		}
		c := r.b[r.i]
		r.i++
		switch {
		case c < fixMap || c >= negative:
		case c < fixArray:
			open += 2 * uint64(c&15)
		case c < fixStr:
			open += uint64(c & 15)
		case c < null:
			r.i += int(c & 31)
		default:
			values, ok := r.skipWide(c)
			if !ok {
				return false
			}
			open += values
		}
	}
	return r.i <= len(r.b)
}

// widths are the sizes of values whose lead byte is null or above: of the length that
// follows, or of the value itself.
var widths = [32]struct{ length, value uint8 }{
	0x04: {1, 0}, 0x05: {2, 0}, 0x06: {4, 0}, // bytes
	0x07: {1, 1}, 0x08: {2, 1}, 0x09: {4, 1}, // extensions with a length
	0x0a: {0, 4}, 0x0b: {0, 8}, // floats
	0x0c: {0, 1}, 0x0d: {0, 2}, 0x0e: {0, 4}, 0x0f: {0, 8}, // unsigned
	0x10: {0, 1}, 0x11: {0, 2}, 0x12: {0, 4}, 0x13: {0, 8}, // signed
	0x14: {0, 2}, 0x15: {0, 3}, 0x16: {0, 5}, 0x17: {0, 9}, 0x18: {0, 17}, // extensions
	0x19: {1, 0}, 0x1a: {2, 0}, 0x1b: {4, 0}, // strings
	0x1c: {2, 0}, 0x1d: {4, 0}, // arrays
	0x1e: {2, 0}, 0x1f: {4, 0}, // maps
}

// skipWide skips what follows the lead byte c of a value. It skips only the length of an array
// or a map, and returns the number of values inside.
func (r *reader) skipWide(c byte) (values uint64, ok bool) {
	if c == unused {
		return 0, false
	}
	w := widths[c-null]
	n, ok := r.number(int(w.length))
	if !ok {
		return 0, false
	}
	switch {
	case c >= map16:
		return 2 * n, true
	case c >= array16:
		return n, true
	}
	_, ok = r.bytes(n + uint64(w.value))
	return 0, ok
}
