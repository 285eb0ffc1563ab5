package cache

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"

// Past is a prompt that a target has computed before the router knew it.
type Past struct {
	// Root and Blocks are as in [Prompt], and Past the length behind the last block, in blocks.
	Root   uint64
	Blocks []uint64
	Past   float32
	// Weight is the milli-tokens in each block that is new to the cache models.
	Weight int64
	// Tokens is the prompt's length as the engine counted it; 0 is unknown.
	Tokens int64
	// Matched is how many leading blocks were known then; -1 is unknown.
	Matched int
}

// Recall records that a target holds a prompt of the past, as if it was used now. It returns how
// many tokens this adds. It adds none if the target is unknown, or has lost its cache meanwhile.
func (c *Caches) Recall(t Target, p *Past) (tokens int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slotOf(t)
	if s == nil || s.losses > 0 || s.lost > 0 {
		return 0
	}
	before := c.sent.Used(s.number)
	chain := approx.Chain{Root: p.Root, Blocks: p.Blocks, Past: p.Past, Weights: Same(p.Weight)}
	c.sent.Touch(s.number, &chain, p.Tokens, p.Matched)
	s.recalled = c.sent.Now() + 1
	return max(0, c.sent.Used(s.number)-before)
}
