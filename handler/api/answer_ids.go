package api

import (
	"encoding/binary"
	"math"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/zeebo/xxh3"
)

// idChain continues the blocks of a prompt of token ids with the ids of its answer.
// vLLM returns these if asked with return_token_ids; SGLang and vLLM always do so at
// their own paths. The last id is left out: the engine need not compute it.
type idChain struct {
	on      bool
	lost    bool // some are missing
	repeats bool // each event has all ids from the first one
	size    int  // of a block, in bytes
	seed    uint64
	tail    []byte
	blocks  []uint64 // the answer's
	last    uint32
	count   int64 // of the answer's ids
}

func (c *idChain) begin(r *Request) {
	if r.Kind != Tokens || r.prompts != 1 || r.Choices != 1 || r.API.Work() != Generate {
		return
	}
	c.on, c.size, c.seed = true, 4*r.block, r.seed
	c.tail = append(make([]byte, 0, c.size), r.tail...)
}

// whole tells whether the chain has all ids of the answer.
func (c *idChain) whole() bool { return c.on && !c.lost && c.count > 0 }

// add appends a list of ids.
func (c *idChain) add(b []byte, v rawjson.Span) { c.addBehind(b, v, 0) }

// grow appends an event's ids. The answer has so many tokens by now, or -1 if that
// is not known; end is whether it ends with this event. Where events repeat the
// ids, only the last one is read.
func (c *idChain) grow(b []byte, v rawjson.Span, tokens int64, end bool) {
	if !c.on || c.lost {
		return
	}
	c.repeats = c.repeats || c.count > 0 && listLen(b, v) == tokens
	switch {
	case !c.repeats:
		c.addBehind(b, v, 0)
	case end:
		c.addBehind(b, v, c.count)
	default:
		return
	}
	c.lost = c.lost || tokens >= 0 && c.count != tokens
}

// addBehind appends the ids of a list behind the first ones.
func (c *idChain) addBehind(b []byte, v rawjson.Span, first int64) {
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
		if n++; n > first {
			c.put(uint32(id))
		}
	}
	c.lost = c.lost || e.Err != nil || len(c.blocks)*c.size > maxAnswer
}

func (c *idChain) put(id uint32) {
	if c.count++; c.count > 1 {
		c.tail = binary.LittleEndian.AppendUint32(c.tail, c.last)
		if len(c.tail) >= c.size {
			c.blocks = append(c.blocks, xxh3.HashSeed(c.tail, c.seed))
			c.tail = c.tail[:0]
		}
	}
	c.last = id
}

// listLen returns the number of elements of a list.
func listLen(b []byte, v rawjson.Span) (n int64) {
	for range v.Elements(b) {
		n++
	}
	return n
}
