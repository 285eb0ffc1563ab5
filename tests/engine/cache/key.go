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

// NewPrompt cuts tokens into blocks of size tokens. Media are in the order of their offsets. They are
// part of the keys as in vLLM: each block has those that overlap it, and where they begin.
func NewPrompt(root Root, tokens []uint32, size int, media ...Media) *Prompt {
	p := &Prompt{Root: root, size: size, media: media}
	p.extend(tokens)
	return p
}

// extend adds tokens at the end.
func (p *Prompt) extend(tokens []uint32) {
	p.Tokens = append(p.Tokens, tokens...)
	for n := len(p.Keys); (n+1)*p.size <= len(p.Tokens); n++ {
		p.Keys = append(p.Keys, child(p.parent(n), p.Tokens[n*p.size:(n+1)*p.size], p.mediaOf(n)))
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
	run := Stored{
		Root: p.Root, First: from == 0, Parent: p.parent(from), Keys: p.Keys[from:to], Tokens: p.Tokens[from*p.size : to*p.size],
		Session: p.Session,
	}
	for n := from; n < to && p.media != nil; n++ {
		run.Media = append(run.Media, p.mediaOf(n))
	}
	return run
}

// Sum returns a hash of the whole prompt, the last part of a block included.
func (p *Prompt) Sum() Key {
	n := len(p.Keys)
	return child(p.parent(n), p.Tokens[n*p.size:], p.mediaOf(n))
}

// Child returns the key of a block after parent.
func Child(parent Key, tokens []uint32) Key { return child(parent, tokens, nil) }

func child(parent Key, tokens []uint32, media []BlockMedia) Key {
	buf := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	for _, m := range media {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(m.Offset))
		buf = append(append(buf, m.Identifier...), 0)
	}
	return Key(xxh3.HashSeed(buf, uint64(parent)))
}

// Media is an image or other media among a prompt's tokens. The tokens in its place are the
// same for all media.
type Media struct {
	Identifier     string
	Offset, Length int // in tokens
}

// BlockMedia is media as a block has it. Offset is from the block's first token, negative if
// the media begin earlier.
type BlockMedia struct {
	Identifier string
	Offset     int
}

// mediaOf returns the media of a block, which may be behind the prompt's last full block.
func (p *Prompt) mediaOf(block int) (list []BlockMedia) {
	from := block * p.size
	for _, m := range p.media {
		if m.Offset < from+p.size && m.Offset+m.Length > from {
			list = append(list, BlockMedia{m.Identifier, m.Offset - from})
		}
	}
	return list
}
