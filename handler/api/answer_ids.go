package api

import (
	"math"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// idChain continues the blocks of a prompt of token ids with the answer's ids.
// vLLM returns these with return_token_ids; at their own paths, SGLang and vLLM
// always do. The chain omits the last id, which the engine need not compute.
type idChain struct {
	idHasher
	block   []byte
	on      bool
	lost    bool // some ids are missing
	repeats bool // each event has all ids from the first one
	last    uint32
	count   int64 // of the answer's ids
}

func (c *idChain) begin(r *Request) {
	if r.Kind != Tokens || r.prompts != 1 || r.Choices != 1 || r.API.Work() != Generate {
		return
	}
	c.on, c.hash, c.block = true, cache.NewTokenHash(r.seed), make([]byte, 4*r.block)
	c.fill = copy(c.block, r.tail)
}

// whole returns whether the chain has all ids of the answer.
func (c *idChain) whole() bool { return c.on && !c.lost && c.count > 0 }

// grow appends an event's ids. total counts the answer's tokens so far, -1 if that
// is unknown; end means that the answer ends with this event. If events repeat the
// ids, only the last one is read.
func (c *idChain) grow(b []byte, v rawjson.Span, total int64, end bool) {
	if !c.on || c.lost || v.End == 0 {
		return
	}
	if !c.repeats && c.count > 0 {
		n := int64(0)
		for range v.Elements(b) {
			n++
		}
		c.repeats = n == total
	}
	switch {
	case !c.repeats:
		c.add(b, v, 0)
	case end:
		c.add(b, v, c.count)
	default:
		return
	}
	c.lost = c.lost || total >= 0 && c.count != total
}

// add appends a list of ids, without the first ones.
func (c *idChain) add(b []byte, v rawjson.Span, without int64) {
	if !c.on || c.lost || v.First(b) != '[' {
		return
	}
	n := int64(0)
	e := rawjson.Enter(b, v.Start)
	for e.Next() {
		id, ok := integer(e.Value().Of(b))
		if !ok || id < 0 || id > math.MaxUint32 {
			c.lost = true
			return
		}
		if n++; n <= without {
			continue
		}
		if c.count++; c.count > 1 {
			c.put(c.block, c.last)
		}
		c.last = uint32(id)
	}
	c.lost = c.lost || e.Err != nil || len(c.blocks)*len(c.block) > maxAnswer
}
