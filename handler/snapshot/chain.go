package snapshot

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Prompts share beginnings. A chain names an earlier chain of its part and the number of
// blocks that it shares with it, and has only the others.

// shared finds the chain of the part that has a certain beginning.
type shared struct {
	chain  int // counts the part's chains from 1
	blocks int // of the beginning
}

// sharing is what a writer knows of the chains in its part.
type sharing struct {
	chains int
	ends   map[uint64]shared // by the hash of a chain up to an end of one of its parts
	chain  []beginning       // of the present chain
}

// beginning is a chain up to an end of one of its parts.
type beginning struct {
	hash   uint64
	blocks int
}

func (s *sharing) reset() {
	s.chains = 0
	if s.ends == nil {
		s.ends = make(map[uint64]shared)
	}
	clear(s.ends)
}

// hash records the chain's beginnings: their hashes and lengths, at the ends of its parts.
func (s *sharing) hash(c *cache.Chain) {
	s.chain = s.chain[:0]
	hash, pos := mix(c.Root), 0
	for i := range c.Parts {
		for _, block := range c.Blocks[pos : pos+c.Parts[i].Blocks] {
			hash = mix(hash ^ block)
		}
		pos += c.Parts[i].Blocks
		s.chain = append(s.chain, beginning{hash, pos})
	}
}

// longest returns the longest beginning of the chain that the part has, and how many of the
// chain's parts it covers.
func (s *sharing) longest() (found shared, parts int) {
	for i, b := range s.chain {
		at, ok := s.ends[b.hash]
		if !ok {
			break
		}
		found, parts = at, i+1
	}
	return found, parts
}

// learn adds the chain, which begins with the first parts that an earlier chain has.
func (s *sharing) learn(parts int) {
	s.chains++
	for _, b := range s.chain[parts:] {
		s.ends[b.hash] = shared{s.chains, b.blocks}
	}
}

// mix is the output function of SplitMix64 (Steele, Lea and Flood, 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Flags of a chain's part.
const (
	flagWeighed = 1 << iota
	flagCounted
	flagArrivals
)

// appendChain appends a chain, of which from covers the first parts.
func appendChain(b []byte, c *cache.Chain, t Target, from shared, parts int) []byte {
	b = appendTarget(append(b, byte(KindChain)), t)
	b = binary.AppendUvarint(b, uint64(from.chain)) //nolint:gosec // positive
	if from.chain == 0 {
		b = binary.LittleEndian.AppendUint64(b, c.Root)
	} else {
		b = binary.AppendUvarint(b, uint64(from.blocks)) //nolint:gosec // positive
	}
	b = binary.AppendUvarint(b, uint64(len(c.Parts)-parts)) //nolint:gosec // positive
	for i := parts; i < len(c.Parts); i++ {
		b = appendPart(b, &c.Parts[i])
	}
	for _, block := range c.Blocks[from.blocks:] {
		b = binary.LittleEndian.AppendUint64(b, block)
	}
	return b
}

func appendPart(b []byte, p *cache.Part) []byte {
	flags := byte(0)
	if p.Weighed {
		flags |= flagWeighed
	}
	if p.Count > 0 {
		flags |= flagCounted
	}
	if p.Arrivals > 0 {
		flags |= flagArrivals
	}
	b = binary.AppendUvarint(append(b, flags), uint64(p.Blocks)) //nolint:gosec // positive
	b = binary.AppendUvarint(b, uint64(p.Weight))                //nolint:gosec // positive
	if p.Count > 0 {
		b = binary.AppendUvarint(b, uint64(p.Count))
		b = binary.AppendUvarint(b, uint64(p.Past))
	}
	if p.Arrivals > 0 {
		b = binary.AppendUvarint(b, uint64(p.Arrivals))
	}
	return b
}

// piece is a chain as a part has it: what it shares, and what it adds.
type piece struct {
	root   uint64
	parent int // 0: none
	shares int // blocks of the parent
	blocks []uint64
	parts  []cache.Part
}

// chain reads a chain into to, whose slices the Part owns.
func (p *Part) chain(to *cache.Chain) (t Target) {
	r := &p.r
	t = r.target()
	var n piece
	if n.parent = r.small(len(p.pieces) - 1); n.parent == 0 {
		n.root = r.fixed()
	} else {
		n.root, n.shares = p.pieces[n.parent].root, r.small(cache.MaxChain)
	}
	own := r.readParts(&n, r.small(min(cache.MaxChain, len(r.b))))
	raw := r.bytes(own * 8)
	n.blocks = make([]uint64, len(raw)/8)
	for i := range n.blocks {
		n.blocks[i] = binary.LittleEndian.Uint64(raw[8*i:])
	}
	p.pieces = append(p.pieces, n)
	if !p.build(len(p.pieces) - 1) {
		r.fail()
		return t
	}
	*to = cache.Chain{Root: n.root, Blocks: p.blocks, Parts: p.parts}
	if !to.Valid() {
		r.fail()
	}
	return t
}

// readParts reads so many parts of a chain. It returns the number of their blocks.
func (r *reader) readParts(n *piece, parts int) (blocks int) {
	for range parts {
		var flags byte
		if b := r.bytes(1); b != nil {
			flags = b[0]
		}
		part := cache.Part{Blocks: r.small(cache.MaxChain), Weight: int32(r.small(math.MaxInt32)), Weighed: flags&flagWeighed != 0} //nolint:gosec // bounded
		if flags&flagCounted != 0 {
			part.Count, part.Past = int32(r.small(math.MaxInt32)), uint16(r.small(math.MaxUint16)) //nolint:gosec // bounded
		}
		if flags&flagArrivals != 0 {
			part.Arrivals = uint16(r.small(math.MaxUint16)) //nolint:gosec // bounded
		}
		if blocks += part.Blocks; r.failed || blocks > cache.MaxChain {
			r.fail()
			return 0
		}
		n.parts = append(n.parts, part)
	}
	return blocks
}

// build puts a chain together. It returns false if an earlier chain is shorter than what it
// shares, or if the chain is too long.
func (p *Part) build(id int) bool {
	p.path = p.path[:0]
	total := len(p.pieces[id].blocks)
	for at := id; at != 0; at = p.pieces[at].parent {
		p.path = append(p.path, at)
	}
	if total += p.pieces[id].shares; total > cache.MaxChain {
		return false
	}
	p.blocks, p.parts = p.blocks[:0], p.parts[:0]
	for _, at := range slices.Backward(p.path) {
		n := &p.pieces[at]
		if !p.cut(n.shares) {
			return false
		}
		p.blocks, p.parts = append(p.blocks, n.blocks...), append(p.parts, n.parts...)
	}
	return true
}

// cut shortens the chain under construction to so many blocks, which must be an end of one
// of its parts.
func (p *Part) cut(blocks int) bool {
	for left := len(p.blocks) - blocks; left > 0; {
		last := len(p.parts) - 1
		left -= p.parts[last].Blocks
		if left < 0 {
			return false
		}
		p.parts = p.parts[:last]
	}
	if blocks > len(p.blocks) {
		return false
	}
	p.blocks = p.blocks[:blocks]
	return true
}
