package kvscore

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// MediaKey returns the hash of the name by which an engine knows an image or other media.
func MediaKey(seed uint64, name []byte) uint64 { return xxh3.HashSeed(name, seed) }

// MediaBlock adds media to the hash of a block of token ids. The ids alone do not identify the
// content, as all images have the same. key is the [MediaKey]. offset is where the media begin,
// in tokens from the begin of the block: it is negative if they begin before the block. Add
// several media in the order of their offsets.
func MediaBlock(seed, block, key uint64, offset int64) uint64 {
	var b [24]byte
	binary.LittleEndian.PutUint64(b[:], block)
	binary.LittleEndian.PutUint64(b[8:], key)
	binary.LittleEndian.PutUint64(b[16:], uint64(offset)) //nolint:gosec // any bits will do
	return xxh3.HashSeed(b[:], seed)
}
