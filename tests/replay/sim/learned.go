package sim

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

const (
	// eventsLate is how long the engines' events take.
	eventsLate = 20 * time.Millisecond
	// textTokens is the mean number of tokens in a block of text.
	textTokens = 16
)

// textWeights are what the router assumes of a block of text.
var textWeights = func() (w [cache.Kinds]int32) {
	for i := range w {
		w[i] = textTokens * 1000
	}
	return w
}()

// textOf divides the tokens of a prompt into blocks of text, which do not end where blocks of tokens do.
// Equal tokens have equal text. Prompts that part in a block of tokens have some of its text in common.
// past is the text behind the last block, in blocks.
func textOf(blocks []uint64, block, tokens int) (text []uint64, past float32) {
	end, before := 0, uint64(0)
	for {
		next := end + textTokens/2 + int(before%(textTokens+1)) //nolint:gosec // small
		k, off := next/block, next%block
		if next > tokens || k > len(blocks) {
			break
		}
		id := uint64(0)
		if k > 0 {
			id = blocks[k-1]
		}
		if common := int(trace.Hash(id>>2) % uint64(block)); off > common { //nolint:gosec // small
			if k == len(blocks) {
				break
			}
			id = blocks[k]
		}
		before = trace.Hash((id ^ uint64(next)<<40) >> 2) //nolint:gosec // not negative
		text = append(text, before&^uint64(cache.KindMask))
		end = next
	}
	return text, float32(tokens-end) / textTokens
}

// asText replaces the blocks of a prompt by those of its text.
func (r *replay) asText(p *cache.Prompt, tokens int) {
	p.Blocks, p.Past = textOf(p.Blocks, r.Trace.BlockTokens, tokens)
	p.BlockTokens, p.Weights.Kinds = textTokens, &textWeights
	for i, sum, next := 0, uint64(0), cache.NextPrefix(0); i < len(p.Blocks); i++ {
		if sum = cache.Mix(sum ^ p.Blocks[i]); i+1 == next {
			p.Prefixes, next = append(p.Prefixes, cache.Prefix{Blocks: next, Sum: sum}), cache.NextPrefix(next)
		}
	}
	p.Tokens = int64((float64(len(p.Blocks)) + float64(p.Past)) * textTokens)
}
