package api

import (
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// idsGiven reads the token ids that a client sent in place of the prompt. It
// returns false if there are none.
func (p *parse) idsGiven() bool {
	if !p.ids.HasContent(p.body) {
		return false
	}
	p.input(p.ids)
	return true
}

func (p *parse) input(v rawjson.Span) {
	b := p.body
	switch v.First(b) {
	case '"':
		p.texts(v, false)
	case '[':
		switch b[rawjson.SkipSpace(b, v.Start+1)] {
		case '"':
			p.texts(v, true)
		case '[':
			p.tokenLists(v)
		case ']':
		default:
			if n, ok := p.tokens(v); ok {
				p.req.Kind, p.req.Tokens, p.req.First, p.req.ids = Tokens, n, n, v
			}
		}
	}
}

// text begins the prompt's text, which is about size bytes of JSON besides
// tools and system prompt.
func (p *parse) text(size int) conversation {
	const most = 4096 // a large body is often one image, which is one block
	const room = 17   // for the last block, and those of a short answer: see Prediction
	size += p.tools.Len() + p.system.Len()
	p.hash = newHasher(p.opt.TextBlock, p.opt.Seed)
	p.hash.blocks = newBlocks(min(size/p.opt.TextBlock, most) + room)
	if len(p.opt.Sizes) > 0 {
		if p.public == nil {
			p.public = xxh3.New()
		}
		p.public.Reset()
		_, _ = p.public.WriteString(p.req.Model) // it never fails
		_, _ = p.public.Write(binary.LittleEndian.AppendUint64(make([]byte, 0, 8), p.req.templateVariant))
		p.hash.public, p.hash.prefixes = p.public, make([]cache.Prefix, 0, 32)
	}
	return conversation{h: &p.hash, b: p.body, seed: p.opt.Seed, lists: [2]rawjson.Span{p.tools, p.functions}}
}

func (p *parse) shown(t *conversation) {
	p.req.Media, p.req.MediaTokens, p.req.MediaEnd = t.media, t.mediaTokens, t.mediaEnd
	p.opaque = p.opaque || t.over
}

func (p *parse) texts(v rawjson.Span, list bool) {
	b, r := p.body, p.req
	p.text(v.Len())
	if !list {
		raw, _ := v.Str(b)
		p.hash.addString(raw)
		r.Kind, r.Bytes, r.given = Text, p.hash.written(), v
		return
	}
	n, size := 0, int64(0)
	for v := range v.Elements(b) {
		raw, ok := v.Str(b)
		if !ok {
			return
		}
		if n == 0 {
			p.hash.addString(raw)
			size = p.hash.written()
		} else {
			size += textLen(raw)
		}
		n++
	}
	r.Kind, r.Bytes, r.prompts = Text, size, n
}

// textLen returns the length of a JSON string's text, in bytes.
func textLen(raw []byte) (n int64) {
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		n += int64(len(p))
	}
	return n
}

func (p *parse) tokenLists(v rawjson.Span) {
	b, r := p.body, p.req
	n, sum := 0, int64(0)
	for v := range v.Elements(b) {
		k, ok := int64(0), false
		if n == 0 && b[v.Start] == '[' {
			k, ok = p.tokens(v)
			r.First = k
		} else if b[v.Start] == '[' {
			_, _, k, ok = p.blocksOf(v, p.opt.BlockSize)
		}
		if !ok {
			r.Blocks = nil
			return
		}
		sum += k
		n++
	}
	r.Kind, r.Tokens, r.prompts = Tokens, sum, n
}

// tokens reads one list of token ids, and makes the request's blocks of them. It is not ok if the list is
// empty or has something else than u32s.
func (p *parse) tokens(v rawjson.Span) (n int64, ok bool) {
	r := p.req
	blocks, tail, n, ok := p.blocksOf(v, p.opt.BlockSize)
	if !ok {
		return 0, false
	}
	r.Blocks, r.tail, r.Past, r.Chains = blocks, tail, float32(len(tail))/float32(p.opt.BlockSize), nil
	for _, size := range p.opt.Sizes {
		c := Chain{BlockSize: size, Blocks: blocks}
		if size != p.opt.BlockSize {
			c.Blocks, _, _, _ = p.blocksOf(v, size)
		}
		r.Chains = append(r.Chains, c)
	}
	return n, true
}

// blocksOf divides a list of token ids into blocks of a size, and the ids behind them.
func (p *parse) blocksOf(v rawjson.Span, size int) (blocks []uint64, tail []uint32, n int64, ok bool) {
	b := p.body
	var stack [1024]byte
	block := stack[:]
	if 4*size > len(stack) {
		block = make([]byte, 4*size)
	}
	block = block[:4*size]
	// A token takes two bytes of JSON at least.
	h := idHasher{hash: cache.TokenHash(p.opt.Seed), blocks: make([]uint64, 0, min(v.Len()/(2*size), 4096))}
	for i := v.Start + 1; ; i++ {
		id, end := readID(b, i)
		if end < 0 {
			return nil, nil, 0, false
		}
		h.put(block, id)
		switch i, n = end, n+1; b[i] {
		case ',':
		case ']':
			return h.blocks, idsOf(block[:h.fill]), n, true
		default:
			return nil, nil, 0, false
		}
	}
}
