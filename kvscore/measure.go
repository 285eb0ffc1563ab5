package kvscore

import (
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// chain returns the prompt as the index sees it.
func (r *Request) chain() index.Chain {
	c := index.Chain{Root: r.Root, Blocks: r.Blocks, Past: r.Past, Media: r.MediaTokens > 0, Weights: r.Weights}
	if c.Weights.Kinds == nil && c.Weights.All == 0 {
		c.Weights = index.Same(int64(r.BlockTokens * 1000))
	}
	return c
}

// priorTokens is the number of known tokens after which a conversation's own ratio weighs
// as much as that of its model.
const priorTokens = 256

// measure returns the prompt's length in tokens and its complete KV blocks. The
// index has matched the chain, and the lock is held.
//
// An engine has counted the known prefix. The rest is estimated:
//
//	tokens = known tokens + ratio x estimate of the rest, by the kinds of its text
//	ratio  = (known tokens + prior) / (estimate of the known prefix + prior)
//
// Tokens of the known prefix above the estimate count as images.
func (s *Scheduler) measure(r *Request, sel *Selection) (tokens int64, blocks float64) {
	c := r.chain()
	m, size, n := &sel.match, float64(s.settings.BlockSize)*1000, float64(len(c.Blocks))
	behind := c.Weights.Sum(c.Blocks[m.Blocks:])
	full := float64(c.Weights.Sum(c.Blocks[:m.Blocks]) + behind)
	if c.Weights.Kinds == nil || m.Blocks == 0 {
		return r.Tokens, full / size
	}
	mean, past := full/n, float64(c.Past)
	rest := max(0, float64(behind)+(past-(m.Known-float64(m.Blocks)))*mean)
	known, estimate := float64(m.KnownTokens), full+past*mean-rest
	media := float64(r.MediaTokens) * 1000
	seen := min(media, max(0, known-estimate))
	ratio := (known - seen + priorTokens*1000) / (estimate + priorTokens*1000)
	text := known - seen + rest*min(max(ratio, 0.25), 4)
	tokens = int64(math.Round((text+media)/1000)) + r.OtherTokens
	return max(tokens, 0), max(0, text+seen-past*mean) / size
}

// overlap sets the overlap of a target that holds a part of the prompt. The index has
// matched the prompt, and the lock is held.
func (s *Scheduler) overlap(r *Request, ld *load, sel *Selection, c *Candidate) {
	m := &sel.match
	c.HeldBlocks = int(m.Held[ld.slot])
	blocks := float64(m.Tokens[ld.slot]) / float64(1000*s.settings.BlockSize)
	if n := m.InUse[ld.slot]; n > 0 {
		c.SharedBlocks = blocks * float64(n) / float64(c.HeldBlocks)
	}
	if r.SkipsCache {
		return
	}
	c.OverlapBlocks = min(blocks, c.RequestBlocks)
	reused := max(0, min(m.Tokens[ld.slot]/1000, sel.Tokens-1)) // the last token is always computed
	c.OverlapTokens = reused - reused%s.page(ld)
}

// page returns the tokens in the smallest block that a target's engine reuses.
func (s *Scheduler) page(ld *load) int64 {
	if ld.page > 0 {
		return ld.page
	}
	return int64(s.settings.BlockSize)
}

// maxCount is the greatest believable factor between an engine's count and the estimate.
const maxCount = 8

// believable returns a count of tokens, or 0 if it is too far from the estimate.
func believable(count, estimate int64) int64 {
	if count > maxCount*estimate+64 || count < estimate/maxCount {
		return 0
	}
	return count
}

// recordCounts puts an engine's counts into the index. The index knows the length of a
// prompt of token ids. An image that ends after the last full block is not in the chain.
// The lock is held.
func (s *Scheduler) recordCounts(l *Lease) {
	prompt := believable(l.counts.Prompt, l.estimate)
	if !l.whole || l.chain.Weights.Kinds == nil || prompt == 0 {
		l.counts.Answer = 0
		return
	}
	if l.counts.Cached > 0 {
		s.index.RecordCached(l.ref, l.held, float64(l.counts.Cached)+float64(s.page(l.load))/2)
	}
	if l.mediaEnd <= l.blocks {
		s.index.RecordCount(l.ref, &l.chain, prompt)
	}
}

// touch records that the target holds prompt and answer. The lock is held.
func (s *Scheduler) touch(l *Lease, answer []uint64) {
	l.chain.Blocks, l.chain.Past = answer, l.counts.AnswerPast
	tokens := int64(0)
	if l.mediaEnd <= len(answer) && l.counts.Answer > 0 {
		more := l.chain.Weights.Sum(answer[min(l.blocks, len(answer)):]) / 1000
		tokens = believable(l.counts.Answer, l.estimate+more)
	}
	s.index.Touch(l.load.slot, &l.chain, tokens)
	l.chain.Blocks = nil
}
