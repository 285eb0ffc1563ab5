package api

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Hasher turns canonical prompt text, written piece by piece, into the hashes
// of its full blocks. How the text is cut into pieces makes no difference. A
// Hasher is made by NewHasher, is not safe for concurrent use, and can be
// continued: Clone one, write more, and the blocks extend the first one's.
type Hasher struct {
	seed   uint64
	size   int
	tail   []byte // the bytes of the block that is not full yet
	blocks []uint64
	before int64 // bytes in full blocks that are not in blocks
}

// slack is how far addEscaped may write behind the end of a block.
const slack = 8

// NewHasher returns a Hasher of blocks of size bytes. The seed should be kept
// secret and is one for the process, so that nobody outside can choose texts
// that collide.
func NewHasher(size int, seed uint64) *Hasher {
	h := newHasher(size, seed)
	return &h
}

func newHasher(size int, seed uint64) Hasher {
	return Hasher{seed: seed, size: size, tail: make([]byte, 0, size+slack)}
}

// Add appends text.
func (h *Hasher) Add(p []byte) {
	if len(h.tail) > 0 {
		k := min(h.size-len(h.tail), len(p))
		h.tail = append(h.tail, p[:k]...)
		p = p[k:]
		if len(h.tail) < h.size {
			return
		}
		h.full(h.tail)
		h.tail = h.tail[:0]
	}
	for len(p) >= h.size {
		h.full(p)
		p = p[h.size:]
	}
	h.tail = append(h.tail, p...)
}

// AddByte appends one byte, which need not be text: see the marks in chat.go.
func (h *Hasher) AddByte(c byte) {
	h.tail = append(h.tail, c)
	if len(h.tail) == h.size {
		h.full(h.tail)
		h.tail = h.tail[:0]
	}
}

// AddString appends the text of a JSON string, given as it stands between its
// quotes; escapes are resolved on the way, so that é and \u00e9 are the same.
func (h *Hasher) AddString(raw []byte) {
	j := bytes.IndexByte(raw, '\\')
	if j < 0 {
		h.Add(raw)
		return
	}
	h.Add(raw[:j])
	h.addEscaped(raw[j:])
}

// addEscaped is AddString for text in which escapes are frequent, as each line
// of a prompt ends in one: it copies eight bytes at a time into the open block
// and looks for a backslash in them on the way.
func (h *Hasher) addEscaped(raw []byte) {
	var buf [utf8.UTFMax]byte
	block := h.tail[:h.size+slack]
	n := len(h.tail)
	for len(raw) >= 8 {
		x := binary.LittleEndian.Uint64(raw)
		binary.LittleEndian.PutUint64(block[n:], x)
		slash := bytesEqual(x, '\\')
		k := 8
		if slash != 0 {
			k = bits.TrailingZeros64(slash) >> 3
		}
		if k >= h.size-n {
			k = h.size - n
			h.full(block)
			n = 0
			raw = raw[k:]
			continue
		}
		n += k
		raw = raw[k:]
		if slash == 0 {
			continue
		}
		if len(raw) >= 2 && raw[1] != 'u' {
			block[n] = unescaped[raw[1]]
			raw = raw[2:]
			if n++; n == h.size {
				h.full(block)
				n = 0
			}
			continue
		}
		m, used := unescape(raw, &buf)
		raw = raw[used:]
		n = h.addBytes(block, n, buf[:m])
	}
	for len(raw) > 0 {
		if raw[0] != '\\' {
			n = h.addBytes(block, n, raw[:1])
			raw = raw[1:]
			continue
		}
		m, used := unescape(raw, &buf)
		raw = raw[used:]
		n = h.addBytes(block, n, buf[:m])
	}
	h.tail = block[:n]
}

// addBytes adds a few bytes to a block that n bytes are in, and returns how
// many are in it then.
func (h *Hasher) addBytes(block []byte, n int, p []byte) int {
	for _, c := range p {
		block[n] = c
		if n++; n == h.size {
			h.full(block)
			n = 0
		}
	}
	return n
}

// full hashes the block.
func (h *Hasher) full(block []byte) {
	h.blocks = append(h.blocks, xxh3.HashSeed(block[:h.size], h.seed))
}

// Blocks returns the hashes of the full blocks so far, in order. The slice is
// the Hasher's own: it must not be changed.
func (h *Hasher) Blocks() []uint64 { return h.blocks }

// Bytes returns how many bytes have been written, in full blocks or not.
func (h *Hasher) Bytes() int64 {
	return h.before + int64(len(h.blocks)*h.size+len(h.tail))
}

// Clone returns an independent copy.
func (h *Hasher) Clone() *Hasher {
	c := h.follow()
	c.before, c.blocks = h.before, slices.Clone(h.blocks)
	return &c
}

// follow returns a Hasher that continues this one, but keeps only the blocks
// that are still to come.
func (h *Hasher) follow() Hasher {
	c := *h
	c.tail = append(make([]byte, 0, h.size+slack), h.tail...)
	c.before += int64(len(h.blocks) * h.size)
	c.blocks = nil
	return c
}

// digest is a streamed 128-bit hash of a part of a message that is not text.
type digest struct{ h xxh3.Hasher }

func (d *digest) add(p []byte) {
	_, _ = d.h.Write(p) // it never fails
}

// addString is Hasher.AddString for a digest.
func (d *digest) addString(raw []byte) {
	r := runs{raw: raw}
	for p := r.next(); p != nil; p = r.next() {
		d.add(p)
	}
}

// addJSON is Hasher.AddJSON for a digest.
func (d *digest) addJSON(raw []byte) {
	c := compact{raw: raw}
	for p := c.next(); p != nil; p = c.next() {
		d.add(p)
	}
}

func (d *digest) sum() [16]byte { return d.h.Sum128().Bytes() }
