package api

import (
	"bytes"
	"encoding/binary"
	"math"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
	"github.com/zeebo/xxh3"
)

// hasher turns canonical text, written in pieces of any size, into the hashes
// of its full blocks.
type hasher struct {
	seed   uint64
	size   int    // of a block, in bytes
	tail   []byte // of the block that is not full yet
	blocks []uint64
	before int   // full blocks that are not in blocks
	kind   uint8 // of the last block, see texts.Block

	public   *xxh3.Hasher // of the full blocks, without a key; nil without prefixes
	prefixes []cache.Prefix
}

func newHasher(size int, seed uint64) hasher {
	return hasher{seed: seed, size: size, tail: make([]byte, 0, size)}
}

func (h *hasher) add(p []byte) {
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
	full := len(p) - len(p)%h.size
	h.full(p[:full])
	h.tail = append(h.tail, p[full:]...)
}

func (h *hasher) addByte(c byte) {
	h.tail = append(h.tail, c)
	if len(h.tail) == h.size {
		h.full(h.tail)
		h.tail = h.tail[:0]
	}
}

// addString appends the text of a JSON string, given between its quotes.
// Canonical text is JSON in its shortest spelling: \u00e9 becomes é, a line break
// stays \n. Thus the hasher reads nearly all text in place.
func (h *hasher) addString(raw []byte) {
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
		h.add(raw[from:i])
		i += h.addEscapes(raw[i:])
		from = i
	}
	h.add(raw[from:])
}

// short are the bytes behind a backslash that have no shorter spelling.
var short = [256]bool{'"': true, '\\': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

// addEscapes appends the text of the escapes at the beginning of raw, up to one
// in its shortest spelling, and returns their length.
func (h *hasher) addEscapes(raw []byte) (used int) {
	var out [64]byte
	var buf [utf8.UTFMax]byte
	n := 0
	for used < len(raw) && raw[used] == '\\' && (used+1 == len(raw) || !short[raw[used+1]]) {
		m, k := rawjson.Unescape(raw[used:], &buf)
		used += k
		n += len(spell(out[n:n], buf[:m]))
		if n > len(out)-8 {
			h.add(out[:n])
			n = 0
		}
	}
	h.add(out[:n])
	return used
}

// spell appends one character of text in JSON's shortest spelling.
func spell(to, p []byte) []byte {
	const (
		hex     = "0123456789abcdef"
		escaped = "\"\\\n\t\r\b\f"
		letters = `"\ntrbf`
	)
	c := p[0]
	if i := strings.IndexByte(escaped, c); i >= 0 {
		return append(to, '\\', letters[i])
	}
	if c < ' ' {
		return append(to, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
	}
	return append(to, p...)
}

// addJSON appends a JSON value without the white space outside its strings and
// with its escapes resolved. Clients spell one value differently.
func (h *hasher) addJSON(raw []byte) {
	c := compact{raw}
	for p := c.next(); p != nil; p = c.next() {
		h.addString(p)
	}
}

// Far into a long text, the kind of one block stands for sampled blocks. This costs
// less than a kind for each, and the sum over a long text needs no more.
const nearBlocks, sampled = 64, 4

func (h *hasher) note(p []byte) {
	for n := len(h.blocks); len(p) >= h.size; {
		next := cache.NextPrefix(n)
		k := min(next-n, len(p)/h.size)
		_, _ = h.public.Write(p[:k*h.size]) // it never fails
		p = p[k*h.size:]
		if n += k; n == next {
			h.prefixes = append(h.prefixes, cache.Prefix{Blocks: n, Sum: h.public.Sum64()})
		}
	}
}

func (h *hasher) full(p []byte) {
	if h.public != nil {
		h.note(p)
	}
	blocks, kind, size, seed := h.blocks, h.kind, h.size, h.seed
	for n := h.before + len(blocks); len(p) >= size; n++ {
		block := p[:size]
		p = p[size:]
		if n < nearBlocks || n%sampled == 0 {
			kind = texts.Kind(block)
		}
		blocks = append(blocks, texts.Block(xxh3.HashSeed(block, seed), kind))
	}
	h.blocks, h.kind = blocks, kind
}

// sum returns a digest of the text so far.
func (h *hasher) sum() uint64 {
	var d digest
	var buf [8]byte
	d.add(h.tail)
	for _, block := range h.blocks {
		binary.LittleEndian.PutUint64(buf[:], block)
		d.add(buf[:])
	}
	return d.sum64()
}

// written returns the length of the text so far, in bytes.
func (h *hasher) written() int64 {
	return int64((h.before+len(h.blocks))*h.size + len(h.tail))
}

// past returns how far the text goes on behind its last full block, in blocks.
func (h *hasher) past() float32 { return float32(len(h.tail)) / float32(h.size) }

// follow returns a hasher that continues this one. Its blocks are only those
// that are still to come.
func (h *hasher) follow() hasher {
	c := *h
	c.tail = append(make([]byte, 0, h.size), h.tail...)
	c.before += len(h.blocks)
	c.blocks = nil
	return c
}

type digest struct{ h xxh3.Hasher }

func (d *digest) add(p []byte) {
	_, _ = d.h.Write(p) // it never fails
}

// addString adds the text of a JSON string, given between its quotes.
func (d *digest) addString(raw []byte) {
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		d.add(p)
	}
}

// addJSON adds a JSON value without the white space outside its strings.
func (d *digest) addJSON(raw []byte) {
	c := compact{raw}
	for p := c.next(); p != nil; p = c.next() {
		d.add(p)
	}
}

func (d *digest) sum() [16]byte { return d.h.Sum128().Bytes() }

func (d *digest) sum64() uint64 {
	sum := d.sum()
	return binary.LittleEndian.Uint64(sum[:])
}

// compact yields a JSON value without the white space outside its strings, in
// pieces that point into it.
type compact struct{ raw []byte }

// next returns the next piece, never an empty one, or nil at the end.
func (c *compact) next() []byte {
	b := c.raw
	at := rawjson.SkipSpace(b, 0)
	for i := at; i < len(b); {
		switch b[i] {
		case '"':
			end, _ := rawjson.SkipString(b, i)
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

// idHasher turns token ids into the hashes of their full blocks. Callers keep the
// memory for one block, which can thus be on the stack.
type idHasher struct {
	hash   cache.TokenHash
	fill   int // bytes of block in use
	blocks []uint64
}

func (h *idHasher) put(block []byte, id uint32) {
	binary.NativeEndian.PutUint32(block[h.fill:], id)
	if h.fill += 4; h.fill == len(block) {
		h.blocks = append(h.blocks, h.hash.Block(block))
		h.fill = 0
	}
}

func idsOf(block []byte) []uint32 {
	ids := make([]uint32, len(block)/4)
	for i := range ids {
		ids[i] = binary.NativeEndian.Uint32(block[4*i:])
	}
	return ids
}

// readID reads the u32 at b[i], with white space around it. It returns the index
// behind both, or -1 if there is none.
func readID(b []byte, i int) (id uint32, end int) {
	if b[i] <= ' ' {
		i = rawjson.SkipSpace(b, i)
	}
	at, n := i, uint64(0)
	// Eleven digits, one more than a u32 has, do not overflow.
	for ; b[i]-'0' <= 9 && i < at+11; i++ {
		n = n*10 + uint64(b[i]-'0')
	}
	if i == at || n > math.MaxUint32 {
		return 0, -1
	}
	if b[i] <= ' ' {
		i = rawjson.SkipSpace(b, i)
	}
	return uint32(n), i
}

// The hashes of a long text take an eighth of its length. To collect them as garbage after
// each request would cost more than to compute them.
var longBlocks sync.Pool // of *[]uint64

const pooledBlocks = 256

func newBlocks(n int) []uint64 {
	if n >= pooledBlocks {
		if b, ok := longBlocks.Get().(*[]uint64); ok && cap(*b) >= n {
			return (*b)[:0]
		}
	}
	return make([]uint64, 0, n)
}

// Done frees the memory of a text's Blocks, which must not be used any more.
func (r *Request) Done() {
	if r.Kind == Text && cap(r.Blocks) >= pooledBlocks {
		blocks := r.Blocks
		longBlocks.Put(&blocks)
	}
	r.Blocks, r.rest.blocks = nil, nil
}
