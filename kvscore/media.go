package kvscore

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// MediaKey returns the hash of the name by which an engine knows an image or other media.
func MediaKey(seed uint64, name []byte) uint64 { return xxh3.HashSeed(name, seed) }

// MediaBlock returns the hash of a block of token ids in which media lie, from the block's hash
// without them. The ids alone do not identify the content: they are the same for all images.
// key is the [MediaKey], offset the first token of the media in the block, negative if they
// begin earlier. Add several media in the order of their offsets.
func MediaBlock(seed, block, key uint64, offset int64) uint64 {
	var b [24]byte
	binary.LittleEndian.PutUint64(b[:], block)
	binary.LittleEndian.PutUint64(b[8:], key)
	binary.LittleEndian.PutUint64(b[16:], uint64(offset)) //nolint:gosec // any bits will do
	return xxh3.HashSeed(b[:], seed)
}
