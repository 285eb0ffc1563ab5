package api

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/zeebo/xxh3"
)

// completions is /v1/completions. Its prompt is text as it is, or token ids;
// the answer continues it without anything between.
type completions struct{}

func (completions) Name() string { return "completions" }
func (completions) Work() Work   { return Generate }
func (completions) shape() shape { return shapeOpenAI }

func (completions) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "prompt":
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "logprobs":
		p.logprobs = !v.IsNull(p.body)
	}
}

func (completions) prompt(p *parse) {
	if p.ids.HasContent(p.body) {
		p.input(p.ids)
		return
	}
	p.input(p.main)
}

// input reads a prompt that is a string or token ids, or a list of either.
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
			if n, ok := p.tokens(v, true); ok {
				p.req.Kind, p.req.Tokens, p.req.First, p.req.ids = Tokens, n, n, v
			}
		}
	}
}

// texts reads a prompt that is a string or a list of strings.
func (p *parse) texts(v rawjson.Span, list bool) {
	b, r := p.body, p.req
	p.begin(v.End - v.Start)
	t := conversation{h: &p.hash, b: b, seed: p.opt.Seed}
	p.beside(&t)
	p.unlike = p.unlike || t.over
	r.Media, r.MediaTokens, r.MediaEnd = t.media, t.mediaTokens, t.mediaEnd
	if !list {
		raw, _ := v.Str(b)
		p.hash.AddString(raw)
		r.Kind, r.Bytes, r.given = Text, p.hash.Bytes(), v
		return
	}
	n, size := 0, int64(0)
	for v := range v.Elements(b) {
		raw, ok := v.Str(b)
		if !ok {
			return
		}
		if n == 0 {
			p.hash.AddString(raw)
			size = p.hash.Bytes()
		} else {
			size += textLen(raw)
		}
		n++
	}
	p.unlike = p.unlike || n > 1 && t.media > 0 // which are whose is not read
	r.Kind, r.Bytes, r.prompts = Text, size, n
}

// tokenLists reads a prompt that is a list of lists of token ids.
func (p *parse) tokenLists(v rawjson.Span) {
	b, r := p.body, p.req
	n, sum := 0, int64(0)
	for v := range v.Elements(b) {
		k, ok := int64(0), false
		if v.First(b) == '[' {
			k, ok = p.tokens(v, n == 0)
		}
		if n == 0 {
			r.First = k
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

// tokens reads one list of token ids, and hashes it into the request's blocks
// if asked to. It is not ok, and the list has no identity, if it is empty or
// anything in it is not a u32.
func (p *parse) tokens(v rawjson.Span, hash bool) (n int64, ok bool) {
	b, size := p.body, p.opt.BlockSize
	var stack [1024]byte
	block := stack[:]
	var blocks []uint64
	if hash {
		if size*4 > len(stack) {
			block = make([]byte, size*4)
		}
		block = block[:size*4]
		// A token takes two bytes of JSON at least.
		blocks = make([]uint64, 0, min((v.End-v.Start)/2/size, 4096))
	}
	fill := 0
	for i := v.Start + 1; ; {
		for hash && i+8 <= len(b) {
			id, digits := short8(binary.LittleEndian.Uint64(b[i:]))
			if digits-1 >= 7 || b[i+digits] != ',' {
				break
			}
			i += digits + 1
			n++
			binary.LittleEndian.PutUint32(block[fill:], uint32(id))
			if fill += 4; fill == len(block) {
				blocks = append(blocks, xxh3.HashSeed(block, p.opt.Seed))
				fill = 0
			}
		}
		if b[i] <= ' ' {
			i = rawjson.SkipSpace(b, i)
		}
		at, id := i, uint64(0)
		// Eleven digits, one more than a u32 has, do not overflow; a number of
		// more is at something else than a comma then.
		for ; b[i]-'0' <= 9 && i < at+11; i++ {
			id = id*10 + uint64(b[i]-'0')
		}
		if i == at || id > math.MaxUint32 {
			return 0, false
		}
		n++
		if hash {
			binary.LittleEndian.PutUint32(block[fill:], uint32(id))
			if fill += 4; fill == len(block) {
				blocks = append(blocks, xxh3.HashSeed(block, p.opt.Seed))
				fill = 0
			}
		}
		if b[i] <= ' ' {
			i = rawjson.SkipSpace(b, i)
		}
		switch b[i] {
		case ',':
			i++
		case ']':
			if hash {
				p.req.Blocks = blocks
				p.req.tail, p.req.Past = slices.Clone(block[:fill]), float32(fill)/float32(len(block))
			}
			return n, true
		default:
			return 0, false
		}
	}
}

func (completions) begin(*Answer) {}

func (completions) event(a *Answer, b []byte, i int) bool {
	return a.chunk(b, i, completionChoice)
}

// completionChoice reads the object at b[i], an element of an answer's or
// chunk's choices, and returns the index behind it, or -1 if it is malformed.
func completionChoice(a *Answer, b []byte, i int) int {
	var index, txt, finish, ids rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("index", &index), rawjson.To("text", &txt), rawjson.To("finish_reason", &finish),
		rawjson.To("token_ids", &ids))
	if end < 0 {
		return -1
	}
	a.ids.add(b, ids)
	a.select0(b, index)
	if raw, ok := txt.Str(b); ok {
		a.text(raw)
	}
	a.finishReason(b, finish)
	return end
}

// short8 reads the number that eight bytes of text begin with, if it has fewer
// digits than that; digits is 0 if there is none, and 8 if there are more.
func short8(x uint64) (n uint64, digits int) {
	x ^= 0x3030303030303030
	// the first byte that is no digit has something in its upper half, or gets it
	other := (x | (x + 0x0606060606060606)) & 0xF0F0F0F0F0F0F0F0
	digits = bits.TrailingZeros64(other) >> 3
	x <<= (64 - 8*uint(digits)) & 63 // the last digit is the last byte now
	x = (x*10 + x>>8) & 0x00FF00FF00FF00FF
	x = (x*100 + x>>16) & 0x0000FFFF0000FFFF
	return (x*10000 + x>>32) & 0xFFFFFFFF, digits
}
