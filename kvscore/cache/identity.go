package cache

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Identity is a prompt of token ids in blocks of one size. Prompts and engines' KV events of
// equal content have equal hashes. The hashes are keyed, so that nobody outside can choose
// collisions.
type Identity struct {
	// BlockTokens is the number of tokens in one of Blocks.
	BlockTokens int
	// Root stands for what must be equal beside the tokens: see [IdentityRoot].
	Root uint64
	// Blocks are the hashes of the full blocks in order: see [TokenHash].
	Blocks []uint64
	// Adapter and Salted say that Root has an adapter or a salt.
	Adapter, Salted bool
}

// SessionHash returns the hash of a session's name, 0 if it is empty.
func SessionHash[T ~string | ~[]byte](name T) uint64 {
	if len(name) == 0 {
		return 0
	}
	return xxh3.HashString(string(name)) | 1
}

// IdentityRoot returns the root of prompts with a LoRA adapter and a cache salt, which may be
// empty. It does not cover the model: each target has one, and aliases of it share blocks.
func IdentityRoot[T ~string | ~[]byte](seed uint64, blockTokens int, adapter, salt T) uint64 {
	var stack [256]byte
	buf := binary.LittleEndian.AppendUint32(stack[:0], uint32(blockTokens)) //nolint:gosec // a block has thousands of tokens at most
	buf = binary.LittleEndian.AppendUint64(buf, uint64(len(adapter)))
	buf = append(buf, adapter...)
	buf = append(buf, salt...)
	return xxh3.HashSeed(buf, seed)
}
