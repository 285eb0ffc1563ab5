package api

import (
	"encoding/binary"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/zeebo/xxh3"
)

// root hashes each field after its length: different requests have different
// bytes.
func (r *Request) root() uint64 {
	buf := make([]byte, 0, 256)
	buf = append(buf, byte(r.Kind))
	buf = binary.LittleEndian.AppendUint32(buf, uint32(r.block))
	for _, s := range [...]string{r.Model, r.LoRA, r.Salt} {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(len(s)))
		buf = append(buf, s...)
	}
	variant := r.cacheVariant
	if r.Kind != Tokens {
		variant ^= r.templateVariant
	}
	buf = binary.LittleEndian.AppendUint64(buf, variant)
	return xxh3.HashSeed(buf, r.seed)
}

// SetSalt replaces the body's salt, and changes Root accordingly. Call it before
// the request is shared.
func (r *Request) SetSalt(salt string) {
	if salt != r.Salt {
		r.Salt = salt
		r.Root = r.root()
	}
}

// SetModel names the model of a request that names none, and changes Root accordingly. Call it
// before the request is shared.
func (r *Request) SetModel(model string) {
	r.Model = model
	r.Root = r.root()
}

// Batch returns whether the body has several prompts.
func (r *Request) Batch() bool { return r.First != max(r.Bytes, r.Tokens) }

// Answers returns how many answers are sent back, to all prompts of a batch
// together.
func (r *Request) Answers() int { return r.answers * r.prompts }

// IDs returns the body's token ids, as a JSON list. It is nil if the body has none, or
// has several prompts. The body must be the one that was parsed.
func (r *Request) IDs(body []byte) []byte {
	if r.Kind != Tokens || r.ids.End == 0 || len(body) != r.size {
		return nil
	}
	return r.ids.Of(body)
}

// PromptText returns a prompt that is one text, as the JSON string in the body. It
// is nil for a conversation, of which the engine makes the prompt, and for a batch.
// The body must be the one that was parsed.
func (r *Request) PromptText(body []byte) []byte {
	if r.Kind != Text || r.given.End == 0 || len(body) != r.size {
		return nil
	}
	return r.given.Of(body)
}

// Give replaces the prompt by token ids: raw, a valid JSON list. The request then
// has the Blocks and the Root of a client's prompt of these ids; o must be what the
// request was parsed with. Give returns false and changes nothing if raw is no list
// of ids, or if the engine would compute more than them. Call it before the request
// is shared. It keeps no reference to raw.
func (r *Request) Give(raw []byte, o Options) (ok bool) {
	v := rawjson.Span{End: len(raw)}
	if r.mixed || v.First(raw) != '[' {
		return false
	}
	p := parse{req: r, opt: o.withDefaults(), body: raw}
	n, ok := p.tokens(v)
	if !ok {
		return false
	}
	r.Kind, r.Tokens, r.First, r.block = Tokens, n, n, p.opt.BlockSize
	if r.cacheVariant != 0 {
		r.Chains = nil
	}
	r.Bytes, r.Media, r.MediaTokens, r.prompts, r.ids, r.predictable = 0, 0, 0, 1, rawjson.Span{}, false
	r.Root = r.root()
	return true
}

// Continues returns whether NextTurn can continue the request and its answer: it
// is a conversation whose next turn begins with both.
func (r *Request) Continues() bool { return r.predictable && r.API.traits().continues }

// BlocksWith returns the blocks of the prompt and an answer's Text together, and
// how far both go on behind the last of these, in blocks. Use it if Continues.
func (r *Request) BlocksWith(answer []byte) (blocks []uint64, past float32) {
	a := Answer{req: r, hash: r.rest.follow()}
	r.API.begin(&a)
	a.hash.addString(answer)
	return slices.Concat(r.Blocks, a.hash.blocks), a.hash.past()
}
