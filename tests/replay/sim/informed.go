package sim

import (
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/rules"
)

// informed shows a policy of the router the blocks that the engines hold, in place of
// the scheduler's cache model. It also shows the prompts in flight that the scheduler
// knows. A router sees that if engines report their KV events without delay.
type informed struct {
	kvscore.Policy
	view *rules.View
}

// Choose implements kvscore.Policy.
func (p *informed) Choose(s *kvscore.Selection) int {
	size, block := float64(s.BlockSize), float64(p.view.Block)
	for i := range s.Candidates {
		c := &s.Candidates[i]
		// A prompt in flight counts only with the request's full blocks.
		flying := int(c.SharedBlocks * size / block)
		c.HeldBlocks = max(p.view.Engines[i].Cache().Held(s.Blocks), flying)
		held := int64(c.HeldBlocks * p.view.Block)
		c.OverlapBlocks = float64(held) / size
		c.OverlapTokens = max(0, min(held, s.Tokens-1)/int64(block)*int64(block))
		context := (c.PromptBlocks + c.OutputBlocks) * size
		c.PrefillTime = c.Slowness * s.Latency.Prefill(s.Tokens-c.OverlapTokens, c.OverlapTokens, context)
	}
	return p.Policy.Choose(s)
}
