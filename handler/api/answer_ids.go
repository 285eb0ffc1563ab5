package api

import (
	"encoding/binary"
	"math"

	"github.com/zeebo/xxh3"
)

// idChain continues the blocks of a prompt of token ids with the ids of its
// answer, where the engine tells these: vLLM if asked with return_token_ids,
// SGLang and vLLM at their own paths always.
type idChain struct {
	on     bool
	lost   bool // some are missing
	size   int  // of a block, in bytes
	seed   uint64
	tail   []byte
	blocks []uint64 // the answer's
	count  int64    // of the answer's ids
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

func (c *idChain) past() float32 { return float32(len(c.tail)) / float32(c.size) }

// add appends a list of ids.
func (c *idChain) add(b []byte, v span) { c.addBehind(b, v, 0) }

// grow appends an event's ids where the answer has so many tokens by now, or -1
// where that is not known. Some engines repeat the ids from the first one.
func (c *idChain) grow(b []byte, v span, tokens int64) {
	if !c.on || c.lost {
		return
	}
	repeated := int64(0)
	if n := c.count; n > 0 && listLen(b, v) == tokens {
		repeated = n
	}
	c.addBehind(b, v, repeated)
	c.lost = c.lost || tokens >= 0 && c.count != tokens
}

// addBehind appends the ids of a list behind the first ones.
func (c *idChain) addBehind(b []byte, v span, first int64) {
	if !c.on || c.lost || v.first(b) != '[' {
		return
	}
	n := int64(0)
	e := enter(b, v.start, 0)
	for e.next() {
		id, ok := integer(e.value().of(b))
		if !ok || id < 0 || id > math.MaxUint32 {
			c.lost = true
			return
		}
		if n++; n > first {
			c.put(uint32(id))
		}
	}
	c.lost = c.lost || e.err != nil || len(c.blocks)*c.size > maxAnswer
}

func (c *idChain) put(id uint32) {
	c.count++
	c.tail = binary.LittleEndian.AppendUint32(c.tail, id)
	if len(c.tail) >= c.size {
		c.blocks = append(c.blocks, xxh3.HashSeed(c.tail, c.seed))
		c.tail = c.tail[:0]
	}
}

// listLen returns the number of elements of a list.
func listLen(b []byte, v span) (n int64) {
	if v.first(b) != '[' {
		return 0
	}
	for e := enter(b, v.start, 0); e.next(); n++ {
		e.value()
	}
	return n
}
