package index

import "math"

// Kinds is how many kinds of content blocks are told apart. The low bits of a
// block's hash name its kind, see [KindMask]: it matters only where Weights have
// Kinds.
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
	// Past is how far the prompt goes on behind the last full block, in blocks;
	// less than 1.
	Past float32
	// Media is whether engines count more in the prompt than the tokens of the
	// blocks: images and the like.
	Media bool
	// Weights are the tokens in a block, as far as nothing better is known.
	Weights Weights
}

func (c *Chain) length() float64 { return float64(len(c.Blocks)) + float64(c.Past) }

// Weights says how many tokens a block stands for, in milli-tokens.
type Weights struct {
	// Kinds has them by the kind of the block; nil if all blocks are alike.
	Kinds *[Kinds]int32
	// All is what each block stands for where Kinds is nil.
	All int32
}

// Same returns the weights of blocks that all stand for so many milli-tokens.
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

// Mean returns how many tokens each of blocks stands for, on average; for no
// blocks, any of their kinds.
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

// longDivision is the length of runs, in blocks, from which on their tokens are
// divided evenly: looking at each block would take too long.
const longDivision = 16 << 10

// divide returns the weights of the first n blocks of a run and of the others,
// by their kinds: the tokens of the run stay what they are.
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

// pastBlocks is how far the prompt that ended behind the run went on, in blocks.
func (r *run) pastBlocks() float64 { return float64(r.past) / (1 << 16) }

// end returns the milli-tokens up to the last block of a run that begins behind
// so many.
func (r *run) end(before int64) int64 {
	if r.count > 0 {
		return max(before, int64(r.count)*1000-int64(r.pastBlocks()*float64(r.weight)))
	}
	return before + int64(len(r.hashes))*int64(r.weight)
}

// RecordCount records how many tokens an engine counted in the prompt that a Ref stands
// for. The whole chain must have been acquired. Of a chain whose blocks have kinds,
// and without media, the weights change so that they add up to the count.
func (x *Index) RecordCount(ref Ref, c *Chain, tokens int64) {
	x.begin()
	x.recordCount(ref, c, tokens)
	x.settle(nil)
}

func (x *Index) recordCount(ref Ref, c *Chain, tokens int64) {
	if ref.run == 0 || tokens <= 0 || tokens > math.MaxInt32 {
		return
	}
	if c.Weights.Kinds != nil && !c.Media {
		x.fit(ref.run, x.uncounted(ref.run, float64(c.Past)), float64(tokens)*1000)
	}
	r := x.runs.at(ref.run)
	r.count, r.past = int32(tokens), uint16(min(max(c.Past, 0)*(1<<16), math.MaxUint16))
}

// leastCached is the share of the expected tokens that an engine must report as
// cached. With less, it has evicted some.
const leastCached = 0.75

// RecordCached records how many tokens an engine had cached of the prompt that a Ref
// stands for. It was expected to hold the first so many blocks. Where prompts fork,
// this is the only count of what they have in common.
func (x *Index) RecordCached(ref Ref, blocks int, tokens float64) {
	for id := ref.run; id != 0; {
		r := x.runs.at(id)
		switch end := int(r.start) + len(r.hashes); {
		case end < blocks:
			return
		case end == blocks && r.count == 0:
			x.begin()
			if u := x.uncounted(id, 0); tokens*1000 >= leastCached*(u.before+u.all) {
				x.fit(id, u, tokens*1000)
			}
			x.settle(nil)
			return
		}
		id = r.parent
	}
}

// stretch is a part of a chain: its runs from the one behind the last prompt whose
// tokens an engine counted, to the end of another prompt.
type stretch struct {
	top    uint32  // the first run
	before float64 // milli-tokens up to there
	all    float64 // milli-tokens of the stretch
	open   float64 // of these, in runs that are not weighed
}

// uncounted returns the stretch that ends past blocks behind a run.
func (x *Index) uncounted(id uint32, past float64) (u stretch) {
	for u.top = id; ; past = 0 {
		r := x.runs.at(u.top)
		tokens := (float64(len(r.hashes)) + past) * float64(r.weight)
		u.all += tokens
		if !r.weighed {
			u.open += tokens
		}
		x.spend(1)
		if r.parent == 0 {
			return u
		}
		if up := x.runs.at(r.parent); up.count > 0 {
			u.before = float64(up.count)*1000 - up.pastBlocks()*float64(r.weight)
			return u
		}
		u.top = r.parent
	}
}

// maxScale bounds by what factor a count changes the weights of runs.
const maxScale = 8

// fit changes the weights of the stretch that ends with a run, so that the chain has
// so many milli-tokens there. It scales the runs that are not weighed. If there are
// none, or the factor is beyond maxScale, it scales all runs.
func (x *Index) fit(id uint32, u stretch, tokens float64) {
	all := false
	f := (tokens - u.before - (u.all - u.open)) / u.open
	if !(f > 1./maxScale && f < maxScale) {
		f, all = (tokens-u.before)/u.all, true
	}
	if !(f > 0 && f < math.MaxInt32) {
		return // there is nothing to scale, or the counts contradict each other
	}
	for ; ; id = x.runs.at(id).parent {
		if r := x.runs.at(id); all || !r.weighed {
			x.reweigh(id, clampWeight(int64(math.Round(float64(r.weight)*f))))
			r.weighed = true
		}
		if id == u.top {
			return
		}
	}
}

// reweigh lets each block of a run stand for so many milli-tokens, on all slots.
func (x *Index) reweigh(id uint32, weight int32) {
	r := x.runs.at(id)
	more := int64(weight) - int64(r.weight)
	if more == 0 {
		return
	}
	r.weight = weight
	for i := r.holds; i != 0; {
		h := x.holds.at(i)
		s := &x.slots[h.slot]
		s.used += int64(h.n) * more
		if h.refs > 0 {
			s.inUse += int64(h.n) * more
		}
		x.spend(1)
		i = h.next
	}
}
