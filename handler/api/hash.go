package api

import (
	"bytes"
	"slices"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
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

// NewHasher returns a Hasher of blocks of size bytes. The seed should be kept
// secret and is one for the process, so that nobody outside can choose texts
// that collide.
func NewHasher(size int, seed uint64) *Hasher {
	h := newHasher(size, seed)
	return &h
}

func newHasher(size int, seed uint64) Hasher {
	return Hasher{seed: seed, size: size, tail: make([]byte, 0, size)}
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
// quotes. Canonical text is JSON in its shortest spelling: é and \u00e9 are the
// same, and a line break stays the two bytes \n. So nearly all of a prompt is
// hashed where it stands, without a copy.
func (h *Hasher) AddString(raw []byte) {
	from := 0
	for i := 0; ; {
		k := bytes.IndexByte(raw[i:], '\\')
		if k < 0 {
			break
		}
		i += k
		if i+1 < len(raw) && short[raw[i+1]] {
			i += 2
			continue
		}
		h.Add(raw[from:i])
		i += h.addEscapes(raw[i:])
		from = i
	}
	h.Add(raw[from:])
}

// short are the bytes behind a backslash that have no shorter spelling.
var short = [256]bool{'"': true, '\\': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

// addEscapes appends what the escapes stand for that raw begins with, up to one
// that is spelled as short as can be, and returns how many bytes they take.
func (h *Hasher) addEscapes(raw []byte) (used int) {
	var out [64]byte
	var buf [utf8.UTFMax]byte
	n := 0
	for used < len(raw) && raw[used] == '\\' && (used+1 == len(raw) || !short[raw[used+1]]) {
		m, k := rawjson.Unescape(raw[used:], &buf)
		used += k
		n += len(spell(out[n:n], buf[:m]))
		if n > len(out)-8 {
			h.Add(out[:n])
			n = 0
		}
	}
	h.Add(out[:n])
	return used
}

// addRune appends one character of text.
func (h *Hasher) addRune(p []byte) {
	var out [8]byte
	h.Add(spell(out[:0], p))
}

// spell appends one character of text in JSON's shortest spelling.
func spell(to, p []byte) []byte {
	c := p[0]
	if c >= ' ' && c != '"' && c != '\\' {
		return append(to, p...)
	}
	switch c {
	case '"', '\\':
		return append(to, '\\', c)
	case '\n':
		return append(to, '\\', 'n')
	case '\t':
		return append(to, '\\', 't')
	case '\r':
		return append(to, '\\', 'r')
	case '\b':
		return append(to, '\\', 'b')
	case '\f':
		return append(to, '\\', 'f')
	}
	const hex = "0123456789abcdef"
	return append(to, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
}

// full hashes the block.
func (h *Hasher) full(block []byte) {
	block = block[:h.size]
	h.blocks = append(h.blocks, kvscore.TextBlock(xxh3.HashSeed(block, h.seed), block))
}

// Blocks returns the hashes of the full blocks so far, in order. The slice is
// the Hasher's own: it must not be changed.
func (h *Hasher) Blocks() []uint64 { return h.blocks }

// Bytes returns how many bytes have been written, in full blocks or not.
func (h *Hasher) Bytes() int64 {
	return h.before + int64(len(h.blocks)*h.size+len(h.tail))
}

// past returns how far the text goes on behind its last full block, in blocks.
func (h *Hasher) past() float32 { return float32(len(h.tail)) / float32(h.size) }

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
	c.tail = append(make([]byte, 0, h.size), h.tail...)
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
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
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
