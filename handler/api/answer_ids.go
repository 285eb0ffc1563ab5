package api

import (
	"math"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// idChain continues the blocks of a prompt of token ids with the answer's ids.
// vLLM and SGLang return these with return_token_ids; at their own paths they
// always do.
type idChain struct {
	ids     []uint32 // of the answer
	on      bool
	lost    bool // some ids are missing
	repeats bool // each event has all ids from the first one
	listed  bool // the event being read has a list of ids

	lens []uint16 // how many ids each event had, if they do not repeat

	most int            // ids; 0 is no limit
	room func(int) bool // whether so many bytes more may be used; nil if they may
}

func (c *idChain) begin(r *Request) {
	if r.Kind != Tokens || r.prompts != 1 || r.Choices != 1 || r.API.Work() != Generate {
		return
	}
	c.on = true
}

// after returns the blocks of a prompt and the answer. It omits the last id, which the engine
// need not compute.
func (c *idChain) after(r *Request) []uint64 {
	hash := cache.TokenHash(r.seed)
	ids := append(slices.Clip(r.tail), c.ids[:len(c.ids)-1]...)
	return hash.AppendBlocks(slices.Clip(r.Blocks), ids, r.block)
}

func (c *idChain) whole() bool { return c.on && !c.lost && len(c.ids) > 0 }

// grow appends an event's ids. total counts the answer's tokens so far, -1 if that
// is unknown; end means that the answer ends with this event. If events repeat the
// ids, only the last one is read.
func (c *idChain) grow(b []byte, v rawjson.Span, total int64, end bool) {
	if !c.on || c.lost || v.End == 0 {
		return
	}
	c.listed = true
	if !c.repeats && len(c.ids) > 0 {
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
		c.add(b, v, len(c.ids))
	default:
		return
	}
	c.lost = c.lost || total >= 0 && int64(len(c.ids)) != total
}

// add appends a list of ids, without the first ones.
func (c *idChain) add(b []byte, v rawjson.Span, without int) {
	if !c.on || c.lost || v.First(b) != '[' {
		return
	}
	c.listed = true
	n := 0
	e := rawjson.Enter(b, v.Start)
	for e.Next() {
		id, ok := integer(e.Value().Of(b))
		if !ok || id < 0 || id > math.MaxUint32 {
			c.lost = true
			return
		}
		if n++; n > without {
			if len(c.ids) == cap(c.ids) && !c.more() {
				c.lost, c.ids = true, nil
				return
			}
			c.ids = append(c.ids, uint32(id))
		}
	}
	if n > 0 && c.most > 0 {
		c.lens = append(c.lens, uint16(min(n, math.MaxUint16))) //nolint:gosec // bounded
	}
	c.lost = c.lost || e.Err != nil || 4*len(c.ids) > maxAnswer || n > math.MaxUint16
}

// more makes room for more ids. It returns false if there is none.
func (c *idChain) more() bool {
	n := max(64, len(c.ids))
	if c.room != nil && (len(c.ids) >= c.most || !c.room(6*n)) {
		return false
	}
	c.ids = slices.Grow(c.ids, n)
	return true
}
