package rawjson

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// SkipSpace returns the index of the first byte from b[i] on that is not white space.
func SkipSpace(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// maxShort is how many bytes SkipString searches itself: keys, ids, a token's text.
const maxShort = 48

// SkipString returns the index behind the string that opens at b[i], or -1 if the
// string does not end. It also returns whether the string is known to have no
// escapes. Most strings are short, like keys: it compares their bytes eight at a
// time.
func SkipString(b []byte, i int) (end int, plain bool) {
	j := i + 1
	for ; j+8 <= len(b) && j < i+maxShort; j += 8 {
		x := binary.LittleEndian.Uint64(b[j:])
		if m := bytesEqual(x, '"') | bytesEqual(x, '\\'); m != 0 {
			j += bits.TrailingZeros64(m) >> 3
			if b[j] != '"' {
				break
			}
			return j + 1, true
		}
	}
	return skipLong(b, i+1, j), false
}

// skipLong returns the index behind the string whose text begins at b[start] and
// has no quote before b[j], or -1 if it does not end. A quote ends it unless an
// odd number of backslashes stands before it; no backslash is counted for two
// quotes, so the time is linear.
func skipLong(b []byte, start, j int) int {
	for ; ; j++ {
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
		end, _ := SkipString(b, i)
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
			end, _ := SkipString(b, i)
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
