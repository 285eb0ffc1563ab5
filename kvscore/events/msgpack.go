package events

import (
	"encoding/binary"
	"math"
	"slices"
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

// reader reads msgpack values at a position. After a failure it is bad and at the payload's end,
// so that all that it reads then fails, too. What a failed method returns means nothing.
//
// It replaces the functions of tinylib/msgp. These need 15 ns for a token where reader needs 6. They
// also allocate for an error, and skip nested values by recursion, 100,000 deep.
type reader struct {
	b   []byte
	i   int
	bad bool
}

func (r *reader) fail() { r.bad, r.i = true, len(r.b) }

// lead returns the first byte of the next value, or unused at the end.
func (r *reader) lead() byte {
	if r.i >= len(r.b) {
		return unused
	}
	return r.b[r.i]
}

// number reads size bytes as a big-endian number.
func (r *reader) number(size int) (v uint64) {
	if len(r.b)-r.i < size {
		r.fail()
		return 0
	}
	for _, c := range r.b[r.i : r.i+size] {
		v = v<<8 | uint64(c)
	}
	r.i += size
	return v
}

// bytes reads n bytes. They alias the payload.
func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)-r.i) {
		r.fail()
		return nil
	}
	end := r.i + int(n)
	b := r.b[r.i:end:end]
	r.i = end
	return b
}

// array reads the header of an array and returns the number of its elements, at most the
// number of bytes that are left.
func (r *reader) array() int { return r.header(fixArray, array16, 1) }

// mapping reads the header of a map and returns the number of its pairs, at most half the
// number of bytes that are left.
func (r *reader) mapping() int { return r.header(fixMap, map16, 2) }

func (r *reader) header(fix, wide byte, values uint64) int {
	c := r.lead()
	n := uint64(c & 15)
	switch {
	case c&0xf0 == fix:
		r.i++
	case c == wide || c == wide+1:
		r.i++
		n = r.number(2 << (c - wide))
	default:
		r.fail()
		return 0
	}
	if n*values > uint64(len(r.b)-r.i) {
		r.fail()
		return 0
	}
	return int(n)
}

// isText reports whether a value is a string or bytes, by its lead byte.
func isText(c byte) bool {
	return c >= fixStr && c < null || c >= str8 && c <= str32 || isBytes(c)
}

func isBytes(c byte) bool { return c >= bin8 && c <= bin32 }

func isArray(c byte) bool { return c >= fixArray && c < fixStr || c == array16 || c == array32 }

func isMap(c byte) bool { return c >= fixMap && c < fixArray || c == map16 || c == map32 }

func isInteger(c byte) bool { return c < fixMap || c >= uint8b && c <= int64b || c >= negative }

func (r *reader) text() []byte {
	c := r.lead()
	base := byte(str8)
	switch {
	case c >= fixStr && c < null:
		r.i++
		return r.bytes(uint64(c & 31))
	case isBytes(c):
		base = bin8
	case !isText(c):
		r.fail()
		return nil
	}
	r.i++
	return r.bytes(r.number(1 << (c - base)))
}

func (r *reader) optional() []byte {
	if r.null() {
		return nil
	}
	return r.text()
}

// textOrOther reads any value. It returns the text of a string, nil for null, and the encoding
// of any other value, bytes included.
func (r *reader) textOrOther() []byte {
	if c := r.lead(); c == null || isText(c) && !isBytes(c) {
		return r.optional()
	}
	start := r.i
	r.skip()
	return r.b[min(start, r.i):r.i:r.i]
}

// key reads a map's key; nil if it is not a string.
func (r *reader) key() []byte {
	if isText(r.lead()) {
		return r.text()
	}
	r.skip()
	return nil
}

func (r *reader) null() bool {
	if r.lead() != null {
		return false
	}
	r.i++
	return true
}

// integer reads an integer of any width. Negative ones are returned in two's complement.
func (r *reader) integer() (v uint64, minus bool) {
	c := r.lead()
	if !isInteger(c) {
		r.fail()
		return 0, false
	}
	r.i++
	switch {
	case c < fixMap:
		return uint64(c), false
	case c >= negative:
		return uint64(int64(int8(c))), true
	case c <= uint64b:
		return r.number(1 << (c - uint8b)), false
	}
	size := 1 << (c - int8b)
	shift := 64 - 8*size
	signed := int64(r.number(size)<<shift) >> shift
	return uint64(signed), signed < 0
}

func (r *reader) natural(most uint64) uint64 {
	v, minus := r.integer()
	if minus || v > most {
		r.fail()
		return 0
	}
	return v
}

// hash reads a block's name: an integer, signed or not, or bytes, of which the last 8 count.
func (r *reader) hash() uint64 {
	if !isBytes(r.lead()) {
		v, _ := r.integer()
		return v
	}
	digest := r.text()
	if len(digest) == 0 {
		r.fail()
	}
	var v uint64
	for _, c := range digest[max(0, len(digest)-8):] {
		v = v<<8 | uint64(c)
	}
	return v
}

// seconds reads a time; 0 if it is none.
func (r *reader) seconds() float64 {
	if r.lead() != float64b {
		r.skip()
		return 0
	}
	r.i++
	t := math.Float64frombits(r.number(8))
	if math.IsNaN(t) || math.IsInf(t, 0) {
		return 0
	}
	return t
}

// uintShifts say how to take an unsigned number out of the 8 bytes that begin with its lead
// byte. Shift them left, then right. size is the number of its bytes, including the lead byte.
// It is 0 if the lead byte begins something else. A table is faster than branches here, because
// the sizes of successive tokens are as good as random.
var uintShifts = func() (shifts [256]struct{ left, right, size uint8 }) {
	for c := range fixMap {
		shifts[c].right, shifts[c].size = 56, 1
	}
	for i, c := range []int{uint8b, uint16b, uint32b} {
		bits := uint8(8) << i
		shifts[c].left, shifts[c].right, shifts[c].size = 8, 64-bits, 1+bits/8
	}
	return shifts
}()

func (r *reader) tokens(dst []uint32, n int) []uint32 {
	dst = slices.Grow(dst, n)
	out := dst[len(dst) : len(dst)+n]
	i, b := r.i, r.b
	for k := range out {
		if i+8 <= len(b) {
			word := binary.BigEndian.Uint64(b[i:])
			s := uintShifts[b[i]]
			if s.size > 0 {
				out[k] = uint32(word << (s.left & 63) >> (s.right & 63))
				i += int(s.size)
				continue
			}
		}
		r.i = i
		if out[k] = r.token(); r.bad {
			return dst
		}
		i = r.i
	}
	r.i = i
	return dst[:len(dst)+n]
}

func (r *reader) token() uint32 { return uint32(r.natural(math.MaxUint32)) }

// bigrams appends the first tokens of n pairs of tokens to dst.
func (r *reader) bigrams(dst []uint32, n int) []uint32 {
	for ; n > 0 && !r.bad; n-- {
		if r.array() != 2 {
			r.fail()
		}
		dst = append(dst, r.token())
		r.token()
	}
	return dst
}

func (r *reader) skipAll(n int) {
	for ; n > 0 && !r.bad; n-- {
		r.skip()
	}
}

// skip skips one value. It needs no stack, however deep values are nested.
func (r *reader) skip() {
	for open := uint64(1); open > 0 && !r.bad; open-- {
		if uint64(len(r.b)-r.i) < open {
			r.fail()
			return
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
			r.bytes(uint64(c & 31))
		default:
			open += r.skipWide(c)
		}
	}
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
func (r *reader) skipWide(c byte) (values uint64) {
	if c == unused {
		r.fail()
		return 0
	}
	w := widths[c-null]
	n := r.number(int(w.length))
	switch {
	case c >= map16:
		return 2 * n
	case c >= array16:
		return n
	}
	r.bytes(n + uint64(w.value))
	return 0
}
