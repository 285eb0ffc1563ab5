package kvscore

import (
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// chain returns the prompt as the index sees it.
func (r *Request) chain() index.Chain {
	c := index.Chain{Root: r.Root, Blocks: r.Blocks, Past: r.Past, Weights: r.Weights}
	if c.Weights.Kinds == nil && c.Weights.All == 0 {
		c.Weights = index.Same(int64(r.BlockTokens * 1000))
	}
	return c
}

// priorTokens is how many tokens of a conversation tell as much about what
// follows as its model does.
const priorTokens = 256

// measure returns the prompt's length in tokens and its complete KV blocks. The
// part that engines have computed before has the count that they told. The rest
// is estimated from its kind of text, corrected by how far that estimate was off
// in the part before. The index has matched the chain, and the lock is held.
func (s *Scheduler) measure(r *Request, c *index.Chain) (tokens int64, blocks float64) {
	m, size := &s.match, float64(s.settings.BlockSize)*1000
	if c.Weights.Kinds == nil || len(c.Blocks) == 0 {
		return r.Tokens, float64(c.Weights.Sum(c.Blocks)) / size
	}
	rest := float64(c.Weights.Sum(c.Blocks[m.Blocks:]))
	full := float64(c.Weights.Sum(c.Blocks[:m.Blocks])) + rest
	mean, length := full/float64(len(c.Blocks)), float64(len(c.Blocks))+float64(c.Past)
	whole := full + float64(c.Past)*mean
	behind := max(0, rest+(float64(c.Past)-(m.Known-float64(m.Blocks)))*mean)
	factor := (float64(m.KnownTokens) + priorTokens*1000) / (whole - behind + priorTokens*1000)
	better := float64(m.KnownTokens) + behind*min(max(factor, 0.25), 4)
	media := float64(r.MediaTokens) * m.Known / length // is in what is known
	tokens = int64(math.Round(better/1000+float64(r.OtherTokens)-media)) + r.MediaTokens
	return max(tokens, 0), max(0, better-float64(c.Past)*mean) / size
}

// overlap fills in what a target has of a prompt that it holds a part of. The index has matched it, and
// the lock is held.
func (s *Scheduler) overlap(r *Request, b *books, tokens int64, c *Candidate) {
	m := &s.match
	held := float64(m.Tokens[b.slot]) / 1000
	c.HeldBlocks = int(m.Held[b.slot])
	c.SharedBlocks = held / float64(s.settings.BlockSize) * float64(m.InUse[b.slot]) / float64(m.Held[b.slot])
	if r.SkipsCache {
		return
	}
	c.OverlapBlocks = held / float64(s.settings.BlockSize)
	page := s.page(b)
	reused := min(m.Tokens[b.slot]/1000, tokens-1) // the last token is always computed
	c.OverlapTokens = max(0, reused/page*page)
}

// page returns how many tokens a block has that the engine of a target reuses whole.
func (s *Scheduler) page(b *books) int64 {
	if b.page > 0 {
		return b.page
	}
	return int64(s.settings.BlockSize)
}

// tell puts an engine's counts at the prompt's end. Where the prompt is token ids
// and those of the answer are not known, the next turn is taken to begin with as
// many more as the answer had. The lock is held.
func (s *Scheduler) tell(l *Lease, answered bool) {
	c := &l.chain
	if l.counts.Cached > 0 && c.Weights.Kinds != nil {
		s.index.TellCached(l.ref, l.held, float64(l.counts.Cached)+float64(s.page(l.books))/2)
	}
	if w := float32(c.Weights.All); !answered && c.Weights.Kinds == nil && l.counts.Answer > 0 && w > 0 {
		s.index.Tell(l.ref, c.Past+float32(l.counts.Answer-l.counts.Prompt)*1000/w, l.counts.Answer)
		return
	}
	s.index.Tell(l.ref, c.Past, l.counts.Prompt)
}
