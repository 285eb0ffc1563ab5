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
// last full one. The part of it that was new stands for the difference to what was
// known. Counts that cannot be true are ignored.
func (x *Index) Tell(ref Ref, past float32, tokens int64) {
	x.begin()
	x.tell(ref, past, tokens)
	x.settle(nil)
}

func (x *Index) tell(ref Ref, past float32, tokens int64) {
	if ref.run == 0 || tokens <= 0 || tokens > math.MaxInt32 {
		return
	}
	if x.fit(ref.run, past, tokens*1000, maxTold) {
		r := x.runs.at(ref.run)
		r.told, r.past = int32(tokens), past
	}
}

// maxLost bounds how far the tokens that an engine reports as cached may be from
// what was expected, as a factor: beyond, it did not have all of them any more.
const maxLost = 1.33

// TellCached records that an engine had so many tokens cached of the prompt that a
// Ref stands for, of which it was thought to hold the first so many blocks. Where
// prompts fork, that is the only count of what they have in common.
func (x *Index) TellCached(ref Ref, blocks int, tokens float64) {
	for id := ref.run; id != 0; {
		r := x.runs.at(id)
		switch end := int(r.start) + len(r.hashes); {
		case end < blocks:
			return
		case end == blocks && r.told <= 0 && id != ref.run:
			x.begin()
			x.fit(id, 0, int64(tokens*1000), maxLost)
			x.settle(nil)
		}
		id = r.parent
	}
}

// fit changes weights so that the prompt which ends past blocks behind a run has so
// many milli-tokens: those of the runs of which no engine has told anything, up to
// the last prompt on the way whose tokens are known. If there are none, or these
// would have to change by more than a factor of most, those of all runs up to there
// change. If these would have to, too, none does, and fit returns false.
func (x *Index) fit(id uint32, past float32, tokens int64, most float64) bool {
	left, open, all := float64(tokens), 0.0, 0.0 // milli-tokens
	top := id                                    // the first run behind that prompt
	for n := 0; ; n++ {
		r := x.runs.at(top)
		weigh := float64(len(r.hashes)) * float64(r.weight)
		if top == id {
			weigh += float64(past) * float64(r.weight)
		}
		if r.told == toldNothing {
			open += weigh
		}
		all += weigh
		x.spend(1)
		if r.parent == 0 || n > maxRuns {
			break
		}
		if up := x.runs.at(r.parent); up.told > 0 {
			left -= float64(up.told)*1000 - float64(up.past)*float64(r.weight)
			break
		}
		top = r.parent
	}
	f, whole := (left-(all-open))/open, false
	if !(f > 1/most && f < most) {
		f, whole = left/all, true
	}
	if !(f > 1/most && f < most) {
		return false
	}
	for ; ; id = x.runs.at(id).parent {
		if r := x.runs.at(id); whole || r.told == toldNothing {
			x.reweigh(id, clampWeight(int64(math.Round(float64(r.weight)*f))))
			if r.told == toldNothing {
				r.told = toldWeight
			}
		}
		if id == top {
			return true
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
