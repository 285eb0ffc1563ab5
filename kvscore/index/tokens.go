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
	// Past is how far the prompt goes on behind the last full block, in blocks.
	Past float32
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

// mean returns the weight of each of blocks, on average.
func (w *Weights) mean(blocks []uint64) int32 {
	if len(blocks) == 0 {
		return 0
	}
	return clampWeight(w.Sum(blocks) / int64(len(blocks)))
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

// end returns the milli-tokens up to the last block of a run that begins behind
// so many.
func (r *run) end(before int64) int64 {
	if r.told > 0 {
		return max(before, int64(r.told)*1000-int64(r.past*float32(r.weight)))
	}
	return before + int64(len(r.hashes))*int64(r.weight)
}

// maxTold bounds how far an engine's count may be from what was expected, as a
// factor: beyond, it is not the count of these blocks.
const maxTold = 8

// Tell records how many tokens an engine counted in the prompt that a Ref stands
// for, which must have been acquired whole and goes on for past blocks behind its
// last full one. What lies between this prompt's end and that of the last one on
// its way whose tokens are known has the difference from now on. Counts that
// cannot be true are ignored.
func (x *Index) Tell(ref Ref, past float32, tokens int64) {
	x.begin()
	x.tell(ref, past, tokens)
	x.settle(nil)
}

func (x *Index) tell(ref Ref, past float32, tokens int64) {
	if ref.run == 0 || tokens <= 0 || tokens > math.MaxInt32 {
		return
	}
	last := x.runs.at(ref.run)
	expected := float64(past) * float64(last.weight)
	told := float64(tokens) * 1000
	top := ref.run // the first run that lies behind the prompt known before
	for n := 0; ; n++ {
		r := x.runs.at(top)
		expected += float64(len(r.hashes)) * float64(r.weight)
		x.spend(1)
		if r.parent == 0 || n > maxRuns {
			break
		}
		if up := x.runs.at(r.parent); up.told > 0 {
			told -= float64(up.told) * 1000
			expected -= float64(up.past) * float64(r.weight)
			break
		}
		top = r.parent
	}
	if f := told / expected; expected > 0 && f > 0 {
		if f > maxTold || f < 1./maxTold {
			return
		}
		for id := ref.run; ; id = x.runs.at(id).parent {
			x.reweigh(id, clampWeight(int64(math.Round(float64(x.runs.at(id).weight)*f))))
			if id == top {
				break
			}
		}
	}
	last.told, last.past = int32(tokens), past
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
