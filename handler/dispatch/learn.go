package dispatch

import (
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// learn records what the engine has counted in a prompt and its answer.
func (o *delivery) learn() {
	m := o.d.Figures
	cached := o.attempt.Worker.CachedTokens(pool.ReportKind{Api: o.d.plan.API.Name(), Stream: o.Stream}, o.Cached)
	if o.Prompt > 0 {
		m.inputTokens.Observe(float64(o.Prompt))
		o.count(cached)
		if cached >= 0 {
			m.reportedHits.Observe(float64(cached) / float64(o.Prompt))
			o.attempt.Worker.Hits.Reported(cached, o.Prompt)
		}
	}
	if o.Completion >= 0 {
		m.outputTokens.Observe(float64(o.Completion))
	}
	o.verify(cached)
	if o.Cached >= 0 {
		o.d.cached = o.Cached
	}
	if o.Chunks > 1 {
		m.itl.Observe(o.Last.Sub(o.First).Seconds() / float64(o.Chunks-1))
	}
}

// count records the engine's counts in the index, for the next turn, and in the model's
// ratios.
func (o *delivery) count(cached int64) {
	req := o.d.plan.Request
	if req.Truncated || req.Kind == api.None {
		return
	}
	if req.Media == 0 && req.Kind == api.Text {
		o.learnRatios(req)
	}
	if req.Batch() {
		return
	}
	c := kvscore.Counts{Prompt: o.Prompt}
	if !req.SkipsCache && cached >= 0 {
		c.Cached, c.CachedTold = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = o.Past
	}
	if o.Completion > 0 && req.Choices == 1 && !o.Failed {
		c.Answer = o.Prompt + o.Completion - 1 // the last token need not be computed
	}
	o.attempt.lease.Counted(c)
}

// learnRatios learns from the new part of the prompt, if the engine's count of the rest is
// known, else from all of it. A batch's first prompt stands for all.
func (o *delivery) learnRatios(req *api.Request) {
	k, size := o.attempt.prompt.known, o.d.plan.TextBlock
	if !k.Counted || req.Batch() {
		k = kvscore.Known{}
	}
	all := float64(req.Bytes) / float64(size)
	past := all - float64(len(req.Blocks)) - k.Past
	o.d.Pool.Ratios.Learn(req.Model, req.Blocks[k.Blocks:], past, size, float64(o.Prompt)-k.Tokens)
}

// verify compares the predicted cached tokens with the engine's count; cached is negative if
// unknown.
func (o *delivery) verify(cached int64) {
	a, d := o.attempt, o.d
	if a.prompt.tokens == 0 || o.Prompt <= 0 || cached < 0 || d.plan.Score.SkipsCache {
		return
	}
	m := d.Figures
	m.comparedPrompt.Add(float64(o.Prompt))
	m.comparedPredicted.Add(float64(a.terms.OverlapTokens))
	m.comparedReported.Add(float64(cached))
	d.Pool.Verify(a.Worker, &pool.Prediction{Begun: a.Begun, Prompt: d.blameKey(), Tokens: a.terms.OverlapTokens, Shared: a.terms.SharedBlocks}, cached)
}
