package events

import (
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// reader reads msgpack values one after the other. After a failure it is bad and has nothing left, so
// that all that it reads then fails, too. What a failed method returns means nothing.
type reader struct {
	b   []byte // what is left
	bad bool
}

func (r *reader) fail() { r.bad, r.b = true, nil }

// kind returns the type of the next value, [msgp.InvalidType] at the end.
func (r *reader) kind() msgp.Type { return msgp.NextType(r.b) }

func (r *reader) is(t msgp.Type) bool { return r.kind() == t }

func (r *reader) isInteger() bool { return r.is(msgp.IntType) || r.is(msgp.UintType) }

func (r *reader) isText() bool { return r.is(msgp.StrType) || r.is(msgp.BinType) }

// take reads a value by a function of package msgp. What it returns may alias the payload.
func take[T any](r *reader, read func([]byte) (T, []byte, error)) T {
	v, rest, err := read(r.b)
	if r.b = rest; err != nil {
		r.fail()
	}
	return v
}

// array reads the header of an array and returns the number of its elements, at most the
// number of bytes that are left.
func (r *reader) array() int { return r.within(take(r, msgp.ReadArrayHeaderBytes), 1) }

// mapping reads the header of a map and returns the number of its pairs, at most half the
// number of bytes that are left.
func (r *reader) mapping() int { return r.within(take(r, msgp.ReadMapHeaderBytes), 2) }

func (r *reader) within(n uint32, values int) int {
	if r.bad || int64(n) > int64(len(r.b)/values) {
		r.fail()
		return 0
	}
	return int(n)
}

// text reads a string or bytes.
func (r *reader) text() []byte {
	if r.is(msgp.BinType) {
		return slices.Clip(take(r, msgp.ReadBytesZC))
	}
	return slices.Clip(take(r, msgp.ReadStringZC))
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
	if r.is(msgp.StrType) || r.is(msgp.NilType) {
		return r.optional()
	}
	begin := r.b
	r.skip()
	return slices.Clip(begin[:len(begin)-len(r.b)])
}

// key reads a map's key; nil if it is not a string.
func (r *reader) key() []byte {
	if r.isText() {
		return r.text()
	}
	r.skip()
	return nil
}

func (r *reader) null() bool {
	if !msgp.IsNil(r.b) {
		return false
	}
	r.b = r.b[1:]
	return true
}

// integer reads an integer of any width. Negative ones are returned in two's complement.
func (r *reader) integer() (v uint64, minus bool) {
	if r.is(msgp.IntType) {
		signed := take(r, msgp.ReadInt64Bytes)
		return uint64(signed), signed < 0
	}
	return take(r, msgp.ReadUint64Bytes), false
}

func (r *reader) natural(most uint64) uint64 {
	v := take(r, msgp.ReadUint64Bytes)
	if v > most {
		r.fail()
	}
	return v
}

// hash reads a block's name: an integer, signed or not, or bytes, of which the last 8 count.
func (r *reader) hash() uint64 {
	if !r.is(msgp.BinType) {
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
	if !r.is(msgp.Float64Type) {
		r.skip()
		return 0
	}
	t := take(r, msgp.ReadFloat64Bytes)
	if math.IsNaN(t) || math.IsInf(t, 0) {
		return 0
	}
	return t
}

func (r *reader) tokens(dst []uint32, n int) []uint32 {
	for ; n > 0 && !r.bad; n-- {
		dst = append(dst, take(r, msgp.ReadUint32Bytes))
	}
	return dst
}

// bigrams appends the first tokens of n pairs of tokens to dst.
func (r *reader) bigrams(dst []uint32, n int) []uint32 {
	for ; n > 0 && !r.bad; n-- {
		if r.array() != 2 {
			r.fail()
		}
		dst = r.tokens(dst, 1)
		r.natural(math.MaxUint32)
	}
	return dst
}

func (r *reader) skipAll(n int) {
	for ; n > 0 && !r.bad; n-- {
		r.skip()
	}
}

// skip skips one value. It fails if values are nested more than 100,000 deep.
func (r *reader) skip() {
	rest, err := msgp.Skip(r.b)
	if r.b = rest; err != nil {
		r.fail()
	}
}
