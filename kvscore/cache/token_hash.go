package cache

import (
	"unsafe"

	"github.com/zeebo/xxh3"
)

// TokenHash hashes blocks of token ids with a seed. A client that does not know the seed cannot
// choose two blocks with equal hashes.
type TokenHash uint64

// AppendBlocks appends the hashes of the full blocks of ids to dst.
func (h TokenHash) AppendBlocks(dst []uint64, ids []uint32, blockTokens int) []uint64 {
	for ; blockTokens > 0 && len(ids) >= blockTokens; ids = ids[blockTokens:] {
		block := unsafe.Slice((*byte)(unsafe.Pointer(&ids[0])), 4*blockTokens) //nolint:gosec // the ids as bytes
		dst = append(dst, h.Block(block))
	}
	return dst
}

// Block returns the hash of a block of token ids, as numbers of 32 bits in the machine's byte order.
func (h TokenHash) Block(ids []byte) uint64 { return xxh3.HashSeed(ids, uint64(h)) }

// Mix is the output function of SplitMix64 (Steele, Lea and Flood, 2014), with its
// increment, so that it maps 0 to another value.
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
