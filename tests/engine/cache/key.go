package cache

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Key names a block by its content and all that comes before it. Two prompts
// have a key in common exactly if they have the whole prefix in common.
type Key uint64

// Root is what a prompt starts from. Prompts of different roots share nothing.
type Root struct {
	// The served base model.
	Model string
	// The LoRA adapter; empty for none.
	LoRA string
	// The request's cache_salt; empty for none.
	Salt string
}

// Key returns the key that is the parent of a prompt's first block.
func (r Root) Key() Key {
	var b []byte
	for _, s := range []string{r.Model, r.LoRA, r.Salt} {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return Key(xxh3.Hash(b))
}

// Prompt is a prompt cut into blocks.
type Prompt struct {
	Root   Root
	Tokens []uint32
	// Keys are those of the full blocks, in order.
	Keys []Key
	// Session goes to the listener with each run of blocks.
	Session string

	size  int // tokens in a block
	media []Media
}

// NewPrompt cuts tokens into blocks of size tokens. It keeps the slice.
func NewPrompt(root Root, tokens []uint32, size int) *Prompt {
	return NewMediaPrompt(root, tokens, size, nil)
}

// Sum returns a hash of the whole prompt, the last part of a block included.
func (p *Prompt) Sum() Key {
	parent := p.Root.Key()
	if n := len(p.Keys); n > 0 {
		parent = p.Keys[n-1]
	}
	return child(parent, p.Tokens[len(p.Keys)*p.size:], p.mediaOf(len(p.Keys)), nil)
}

// Child returns the key of a block after parent.
func Child(parent Key, tokens []uint32) Key { return child(parent, tokens, nil, nil) }

// child returns the key of a block after parent. It works in buf if that is
// large enough.
func child(parent Key, tokens []uint32, media []BlockMedia, buf []byte) Key {
	buf = buf[:0]
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	for _, m := range media {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(m.Offset))
		buf = append(append(buf, m.Identifier...), 0)
	}
	return Key(xxh3.HashSeed(buf, uint64(parent)))
}
