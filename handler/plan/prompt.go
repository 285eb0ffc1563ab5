package plan

import (
	"cmp"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

func (p *Plan) identify(opts api.Options, ratios *texts.Ratios, adapter func(model string) (string, bool)) {
	req, score, size := p.Request, &p.Score, opts.TextBlock
	score.Streamed, score.SkipsCache = req.Stream || req.API.Work() == api.Prefill, req.SkipsCache
	score.Identities, score.Prefixes = nil, nil
	// WithTokens identifies again.
	score.Weights, score.MediaTokens, score.OtherTokens, score.MediaEnd = cache.Weights{}, 0, 0, 0
	if req.API.Work() == api.Count {
		score.Tokens = 0 // nothing is computed: any worker can do it
		return
	}
	switch req.Kind {
	case api.Tokens:
		score.BlockTokens, score.Tokens = float64(opts.BlockSize), req.Tokens
		score.Identities = identities(req, req.Chains, opts.Seed, adapter)
	case api.Text:
		score.Weights = ratios.Weights(req.Model, size)
		score.NominalBlockTokens = float64(size) / texts.BytesPerToken
		score.BlockTokens = score.Weights.Mean(req.Blocks)
		score.Head = req.Head
		score.MediaTokens, score.MediaEnd = req.MediaTokens, int((req.MediaEnd+int64(size)-1)/int64(size))
		score.OtherTokens = int64(float64(req.Bytes-req.First) / float64(size) * score.BlockTokens)
		score.Tokens = int64(float64(req.First)/float64(size)*score.BlockTokens) + score.OtherTokens + req.MediaTokens
		if req.Media == 0 && !req.Truncated && !req.Batch() {
			chains := make([]api.Chain, 0, len(opts.Sizes))
			for _, tokens := range opts.Sizes {
				chains = append(chains, api.Chain{BlockSize: tokens})
			}
			score.Prefixes = req.Prefixes
			score.Identities = identities(req, chains, opts.Seed, adapter) // the cache models know the blocks, if anyone does
		}
	case api.None:
		p.Fallback = fallbackNoPrompt
		return
	}
	score.Root, score.Blocks, score.Past, p.TextBlock = req.Root, req.Blocks, req.Past, size
}

// Length returns how many tokens the prompt has at least, about, and its answer at most; 0 is unknown.
// The first prompt of a batch counts. The length of a prompt that the engine may cut does not matter.
func (p *Plan) Length() (prompt, answer int64) {
	req := p.Request
	if req == nil || req.Truncated || req.Kind == api.None {
		return 0, 0
	}
	prompt = p.Score.Tokens - p.Score.OtherTokens
	if req.Kind == api.Text {
		prompt -= prompt / 8 // it is an estimate
	} else if req.First > 0 {
		prompt = req.First
	}
	if req.API.Work() == api.Generate {
		answer = max(1, req.MaxTokens)
	}
	return prompt, answer
}

// identities returns a prompt, divided into chains, as the engines' KV events name it. adapterOf
// is Reader.Adapter.
func identities(req *api.Request, chains []api.Chain, seed uint64, adapterOf func(model string) (string, bool)) []cache.Identity {
	if len(chains) == 0 {
		return nil
	}
	adapter, known := adapterOf(req.Model)
	if adapter = cmp.Or(req.LoRA, adapter); adapter == "" && !known {
		return nil
	}
	list := make([]cache.Identity, 0, len(chains))
	for _, c := range chains {
		list = append(list, cache.Identity{
			BlockTokens: c.BlockSize, Root: cache.IdentityRoot(seed, c.BlockSize, adapter, req.Salt), Blocks: c.Blocks,
			Adapter: adapter != "", Salted: req.Salt != "",
		})
	}
	return list
}

// priority returns the weight of the request's own time against others' time: above 0, more.
func priority(h *nvext.AgentHints) int {
	switch {
	case h.StrictPriority.Value > 0:
		return 1
	case h.Priority.Set:
		return int(h.Priority.Value)
	case h.LatencySensitivity.Value > 0:
		return 1
	}
	return 0
}

// WithTokens returns the plan of the same request with token ids as the prompt; nil if that
// is not possible. The plan has no body.
func (rd *Reader) WithTokens(of *Plan, ids []byte) *Plan {
	p, req, opts := *of, *of.Request, rd.Hashing()
	if !req.Give(ids, opts) {
		return nil
	}
	p.Request, p.Body = &req, nil
	p.identify(opts, rd.Ratios, rd.Adapter)
	return &p
}

// maxKept is the longest text, in bytes, that a plan keeps. It keeps the digest of a longer
// one.
const maxKept = 4 << 10

// detach copies a request's strings. The plan lives as long as the answer, and must not keep
// the body in memory.
func detach(req *api.Request) {
	for _, s := range []*string{
		&req.Model, &req.LoRA, &req.Salt, &req.PreviousResponse,
	} {
		*s = kept(*s, maxKept)
	}
	for _, s := range []*string{&req.Conversation, &req.CacheKey, &req.SessionID, &req.UserSession} {
		key := strings.TrimSpace(*s)
		*s = strings.Clone(key[:min(len(key), maxSessionKey+1)]) // a longer one is refused
	}
}
