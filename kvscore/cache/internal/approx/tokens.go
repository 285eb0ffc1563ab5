package approx

import "math"

// Kinds is the number of kinds of content blocks. The low bits of a block's hash are its
// kind, see [KindMask]. Kinds matter only if Weights have Kinds.
const (
	Kinds    = 32
	KindMask = Kinds - 1
)

// Chain is a prompt as the index sees it.
type Chain struct {
	// Root is what must be equal for two prompts to share anything.
	Root uint64
	// Blocks are the content hashes of the full blocks in order.
	Blocks []uint64
	// Past is the length of the prompt after the last full block, in blocks; less than 1.
	Past float32
	// Media says that the prompt has tokens outside of the blocks: images and other media.
	Media bool
	// Weights are the tokens in a block, used where no count is known.
	Weights Weights
}

func (c *Chain) length() float64 { return float64(len(c.Blocks)) + float64(c.Past) }

// Weights says how many tokens a block stands for, in milli-tokens.
type Weights struct {
	// Kinds has the weights by the kind of the block; nil if all blocks are alike.
	Kinds *[Kinds]int32
	// All is the weight of each block if Kinds is nil.
	All int32
}

// Same returns equal weights for all blocks, in milli-tokens.
func Same(milliTokens int64) Weights { return Weights{All: clampWeight(milliTokens)} }

func clampWeight(w int64) int32 { return int32(min(max(w, 0), math.MaxInt32)) }

// Sum returns the milli-tokens of blocks.
func (w *Weights) Sum(blocks []uint64) (sum int64) {
	if w.Kinds == nil {
		return int64(len(blocks)) * int64(w.All)
	}
	for _, b := range blocks {
		sum += int64(w.Kinds[b&KindMask])
	}
	return sum
}

// Mean returns the average tokens of the blocks, or without blocks, of the first 8 kinds.
func (w *Weights) Mean(blocks []uint64) float64 {
	if len(blocks) > 0 {
		return float64(w.Sum(blocks)) / float64(len(blocks)) / 1000
	}
	any := float64(w.All)
	if w.Kinds != nil {
		any = 0
		for _, n := range w.Kinds[:8] {
			any += float64(n) / 8
		}
	}
	return any / 1000
}

// longDivision is the length of runs, in blocks, above which divide assumes equal blocks: a
// look at each block would take too long.
const longDivision = 16 << 10

// divide returns the weights of the first n blocks of a run and of the others, by their
// kinds. The tokens of the run do not change.
func (w *Weights) divide(r *run, n int) (first, rest int32) {
	if w.Kinds == nil || len(r.hashes) > longDivision || n == len(r.hashes) {
		return r.weight, r.weight
	}
	a, b := float64(w.Sum(r.hashes[:n])), float64(w.Sum(r.hashes[n:]))
	if a+b <= 0 {
		return r.weight, r.weight
	}
	all := float64(r.weight) * float64(len(r.hashes))
	upper := all * a / (a + b)
	return clampWeight(int64(upper / float64(n))), clampWeight(int64((all - upper) / float64(len(r.hashes)-n)))
}

// pastBlocks returns the length after the run of the prompt that ended there, in blocks.
func (r *run) pastBlocks() float64 { return float64(r.past) / (1 << 16) }

// end returns the milli-tokens up to the end of a run. before is the milli-tokens before it.
func (r *run) end(before int64) int64 {
	if r.count > 0 {
		return max(before, int64(r.count)*1000-int64(r.pastBlocks()*float64(r.weight)))
	}
	return before + int64(len(r.hashes))*int64(r.weight)
}

// RecordCount records an engine's count of the tokens in a Ref's prompt. The whole chain
// must have been acquired. If the blocks have kinds and there are no media, the weights
// change so that they add up to the count.
func (x *Index) RecordCount(ref Ref, c *Chain, tokens int64) {
	if ref.run == nil || tokens <= 0 || tokens > math.MaxInt32 {
		return
	}
	if c.Weights.Kinds != nil && !c.Media {
		x.fit(ref.run, ref.run.uncounted(float64(c.Past)), float64(tokens)*1000)
	}
	r := ref.run
	r.count, r.past = int32(tokens), uint16(min(max(c.Past, 0)*(1<<16), math.MaxUint16))
}

// leastCached is the least share of the expected tokens that an engine reports as cached.
// With less, it has evicted some.
const leastCached = 0.75

// RecordCached records the tokens of a Ref's prompt that an engine had cached. blocks is the
// number of leading blocks that the cache model expected there. If prompts fork, this is
// the only count of their common part.
func (x *Index) RecordCached(ref Ref, blocks int, tokens float64) {
	for r := ref.run; r != nil; r = r.up {
		switch end := int(r.start) + len(r.hashes); {
		case end < blocks:
			return
		case end == blocks && r.count == 0:
			if u := r.uncounted(0); tokens*1000 >= leastCached*(u.before+u.all) {
				x.fit(r, u, tokens*1000)
			}
			return
		}
	}
}

// stretch is a part of a chain: the runs after the last prompt that an engine counted, up to
// the end of another prompt.
type stretch struct {
	top    *run    // the first
	before float64 // milli-tokens up to there
	all    float64 // milli-tokens of the stretch
	open   float64 // of these, in runs that are not weighed
}

// uncounted returns the stretch that ends past blocks after the run.
func (r *run) uncounted(past float64) (u stretch) {
	for u.top = r; ; past = 0 {
		r := u.top
		tokens := (float64(len(r.hashes)) + past) * float64(r.weight)
		u.all += tokens
		if !r.weighed {
			u.open += tokens
		}
		if r.up == nil {
			return u
		}
		if up := r.up; up.count > 0 {
			u.before = float64(up.count)*1000 - up.pastBlocks()*float64(r.weight)
			return u
		}
		u.top = r.up
	}
}

// maxScale bounds the factor by which a count changes the weights of runs.
const maxScale = 8

// fit changes the weights of the stretch that ends with a run, so that the chain has the
// given milli-tokens there. It scales the runs that are not weighed. If there are none, or
// if the factor exceeds maxScale, it scales all runs.
func (x *Index) fit(r *run, u stretch, tokens float64) {
	all := false
	f := (tokens - u.before - (u.all - u.open)) / u.open
	if !(f > 1./maxScale && f < maxScale) {
		f, all = (tokens-u.before)/u.all, true
	}
	if !(f > 0 && f < math.MaxInt32) {
		return // nothing to scale, or contradictory counts
	}
	for ; ; r = r.up {
		if all || !r.weighed {
			x.reweigh(r, clampWeight(int64(math.Round(float64(r.weight)*f))))
			r.weighed = true
		}
		if r == u.top {
			return
		}
	}
}

// reweigh sets the milli-tokens of each block of a run, on all slots.
func (x *Index) reweigh(r *run, weight int32) {
	more := int64(weight) - int64(r.weight)
	if more == 0 {
		return
	}
	r.weight = weight
	for _, h := range r.holds {
		s := x.slots[h.slot]
		if h.refs > 0 {
			s.inUse.Add(int64(h.n) * more)
		}
		switch {
		case !h.lost:
			s.add(h, int64(h.n)*more)
		case h.refs > 0:
			s.lost += int64(h.n) * more
		}
	}
}
