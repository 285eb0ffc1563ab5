package handler

import (
	"math/bits"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// promptLength is how long a prompt was taken to be when an attempt was booked.
type promptLength struct {
	tokens int64 // 0 is unknown
	known  kvscore.Known
}

// counted records how many tokens the engine counted in the prompt and the
// answer: in the index, where the next turn finds it, and as ratios of the model's
// kinds of text.
func (o *observer) counted(req *api.Request, prompt, completion, cached int64) {
	if req.Truncated || req.Kind == api.None {
		return
	}
	if req.Media == 0 && req.Kind == api.Text {
		o.learnRatios(req, prompt)
	}
	if req.Batch() {
		return
	}
	c := kvscore.Counts{Prompt: prompt}
	if !req.SkipsCache && cached >= 0 {
		c.Cached, c.CachedTold = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = o.reader.PredictionPast()
	}
	if completion > 0 && req.Choices == 1 && !o.reader.Failed() {
		c.Answer = prompt + completion - 1 // the last token need not be computed
	}
	o.attempt.lease.Counted(c)
}

// learnRatios learns from the part of the prompt that was new, if the engine's
// count of the other part is known, else from all of it. Of a batch, the first
// prompt's blocks stand for all.
func (o *observer) learnRatios(req *api.Request, prompt int64) {
	k, size := o.attempt.prompt.known, o.rt.plan.textBlock
	if !k.Counted || req.Batch() {
		k = kvscore.Known{}
	}
	all := float64(req.Bytes) / float64(size)
	past := all - float64(len(req.Blocks)) - k.Past
	o.rt.pool.ratios.Learn(req.Model, req.Blocks[k.Blocks:], past, size, float64(prompt)-k.Tokens)
}

// verify compares a prediction with the counts of the engine, in tokens; cached is
// negative if it is not known.
func (o *observer) verify(prompt, cached int64) {
	a, m := o.attempt, o.rt.figures
	if a.prompt.tokens == 0 || prompt <= 0 || cached < 0 || o.rt.plan.score.SkipsCache {
		return
	}
	m.comparedPrompt.Add(float64(prompt))
	m.comparedPredicted.Add(float64(a.terms.OverlapTokens))
	m.comparedReported.Add(float64(cached))
	o.rt.pool.verify(a.worker, &prediction{a.begun, o.rt.promptKey(), a.terms.OverlapTokens, a.terms.SharedBlocks}, cached)
}

// promptKey identifies a prompt by its session, or else by all its blocks.
func (rt *route) promptKey() uint64 {
	if rt.plan.session.key != "" {
		return xxh3.HashString(rt.plan.session.key)
	}
	key := rt.plan.score.Root
	for _, b := range rt.plan.score.Blocks {
		key = (bits.RotateLeft64(key, 5) ^ b) * 0x9e3779b97f4a7c15
	}
	return key
}

// blameKey tells requests apart in what is held against a worker: by their session
// or their whole prompt. Those that are no inference are all alike.
func (rt *route) blameKey() uint64 {
	switch {
	case rt.plan.api == nil:
		return 0
	case rt.plan.session.key == "" && len(rt.plan.score.Blocks) == 0:
		return uint64(rt.ready.UnixNano()) //nolint:gosec // after 1970
	}
	return rt.promptKey()
}

// keep remembers which target keeps the response that an answer is, as soon as its
// id is there: clients may name it while it is still being made.
func (o *observer) keep() {
	req := o.rt.plan.request
	if o.kept || req == nil || req.Unstored {
		return
	}
	if id := o.reader.ResponseID(); id != "" {
		o.kept = true
		o.rt.pool.responses.keep(id, o.attempt.lease.Target())
	}
}
