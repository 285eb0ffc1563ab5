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

	size int // tokens in a block
}

// NewPrompt cuts tokens into blocks of size tokens.
func NewPrompt(root Root, tokens []uint32, size int) *Prompt {
	p := &Prompt{Root: root, size: size}
	p.extend(tokens)
	return p
}

// extend adds tokens at the end.
func (p *Prompt) extend(tokens []uint32) {
	p.Tokens = append(p.Tokens, tokens...)
	for n := len(p.Keys); (n+1)*p.size <= len(p.Tokens); n++ {
		p.Keys = append(p.Keys, Child(p.parent(n), p.Tokens[n*p.size:(n+1)*p.size]))
	}
}

// parent returns the key before block n.
func (p *Prompt) parent(n int) Key {
	if n == 0 {
		return p.Root.Key()
	}
	return p.Keys[n-1]
}

// blocks returns a run of full blocks.
func (p *Prompt) blocks(from, to int) Stored {
	return Stored{
		Root: p.Root, First: from == 0, Parent: p.parent(from), Keys: p.Keys[from:to], Tokens: p.Tokens[from*p.size : to*p.size],
		Session: p.Session,
	}
}

// Sum returns a hash of the whole prompt, the last part of a block included.
func (p *Prompt) Sum() Key {
	n := len(p.Keys)
	return Child(p.parent(n), p.Tokens[n*p.size:])
}

// Child returns the key of a block after parent.
func Child(parent Key, tokens []uint32) Key {
	buf := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	return Key(xxh3.HashSeed(buf, uint64(parent)))
}
