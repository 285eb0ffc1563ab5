package api

import (
	"bytes"
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// root hashes each field behind its length, so that no two different
// requests are written the same.
func (r *Request) root() uint64 {
	buf := make([]byte, 0, 256)
	buf = append(buf, byte(r.Kind))
	buf = binary.LittleEndian.AppendUint32(buf, uint32(r.block))
	for _, s := range [...]string{r.Model, r.LoRA, r.Salt} {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(len(s)))
		buf = append(buf, s...)
	}
	variant := r.variant
	if r.Kind != Tokens {
		variant ^= r.written
	}
	buf = binary.LittleEndian.AppendUint64(buf, variant)
	return xxh3.HashSeed(buf, r.seed)
}

// SetSalt makes the salt another one than the body's own, with the Root that
// follows from it. It is for whoever has just parsed the request, before others
// see it.
func (r *Request) SetSalt(salt string) {
	if salt != r.Salt {
		r.Salt = salt
		r.Root = r.root()
	}
}

// Batch is whether the body has several prompts.
func (r *Request) Batch() bool { return r.First != max(r.Bytes, r.Tokens) }

// Answers is how many answers are sent back: so many to each prompt of a batch.
func (r *Request) Answers() int { return r.answers * r.prompts }

// AppendTokens appends the prompt's token ids as a JSON array, as they stand in
// the body, but for white space. It returns dst as it was if the body has none,
// or has several prompts. The body must be the one that was parsed.
func (r *Request) AppendTokens(dst, body []byte) []byte {
	if r.Kind != Tokens || r.ids.End == 0 || len(body) != r.size {
		return dst
	}
	for part := range bytes.FieldsSeq(r.ids.Of(body)) {
		dst = append(dst, part...)
	}
	return dst
}
