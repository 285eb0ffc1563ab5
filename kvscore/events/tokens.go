package events

import (
	"encoding/binary"
	"math"
	"slices"
)

// uintShifts say how to take an unsigned number out of the 8 bytes that begin with its lead
// byte. Shift them left, then right. size is the number of its bytes, including the lead byte.
// It is 0 if the lead byte begins something else. A table is faster than branches here, because the sizes
// of successive tokens are as good as random.
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

// tokens appends an array of n tokens to dst.
func (r *reader) tokens(dst []uint32, n int) ([]uint32, bool) {
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
		token, ok := r.token()
		if !ok {
			return dst, false
		}
		out[k], i = token, r.i
	}
	r.i = i
	return dst[:len(dst)+n], true
}

// token reads a token of any width.
func (r *reader) token() (uint32, bool) {
	v, minus, ok := r.integer()
	return uint32(v), ok && !minus && v <= math.MaxUint32
}

// bigrams appends the first tokens of n pairs of tokens to dst.
func (r *reader) bigrams(dst []uint32, n int) ([]uint32, bool) {
	for range n {
		if size, isPair := r.array(); !isPair || size != 2 {
			return dst, false
		}
		first, ok := r.token()
		if !ok || !r.skip() {
			return dst, false
		}
		dst = append(dst, first)
	}
	return dst, true
}
