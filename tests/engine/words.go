package engine

import (
	"math/rand/v2"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

var syllables = [...]string{"ba", "ke", "mi", "no", "ru", "sel", "tor", "vin", "lam", "dex", "po", "ga", "hir", "zu", "fen", "cor"}

// answer returns the tokens of the answer to a prompt, and why it ends: "stop"
// with the end token, or "length" after most tokens. It depends on nothing but
// the prompt and what the request says of it.
func (e *Engine) answer(p *cache.Prompt, r *request, most int) ([]uint32, string) {
	n := max(e.cfg.AnswerTokens, r.MinTokens)
	stop := n <= most
	if r.IgnoreEOS {
		n, stop = most, false
	}
	n = min(n, most)
	answer := e.words(uint64(p.Sum())^uint64(r.Seed), n) //nolint:gosec // any bits will do
	if stop {
		answer[n-1] = endToken
		return answer, "stop"
	}
	return answer, "length"
}

// words returns n tokens of made-up words.
func (e *Engine) words(sum uint64, n int) []uint32 {
	if !e.cfg.Words {
		return words(sum, n)
	}
	text := detokenize(words(sum, 3*n)) // at most 7 of their bytes are a token
	return tokens(" "+text, firstWord)[:n]
}

// words returns n tokens of made-up words. The text is ASCII without newlines, so
// any of its tokens' prefixes is tokenized as it was generated.
func words(seed uint64, n int) []uint32 {
	rng := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // not a secret
	text := make([]byte, 0, 4*n+16)
	for len(text) < 4*n {
		for range 2 + rng.IntN(3) {
			text = append(text, syllables[rng.IntN(len(syllables))]...)
		}
		text = append(text, ' ')
	}
	return tokens(string(text[:4*n]), firstRun)
}
