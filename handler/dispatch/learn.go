package dispatch

import (
	"math/bits"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// learn records what the engine has counted in a prompt and its answer.
func (d *delivery) learn() {
	m := d.rt.Figures
	cached := d.attempt.Worker.CachedTokens(pool.ReportKind{API: d.rt.plan.API.Name(), Stream: d.Stream}, d.Cached)
	if d.Prompt > 0 {
		m.inputTokens.Observe(float64(d.Prompt))
		d.count(cached)
		if cached >= 0 {
			m.reportedHits.Observe(float64(cached) / float64(d.Prompt))
			d.attempt.Worker.Hits.Reported(cached, d.Prompt)
		}
	}
	if d.Completion >= 0 {
		m.outputTokens.Observe(float64(d.Completion))
	}
	d.verify(cached)
	if d.Cached >= 0 {
		d.rt.cached = d.Cached
	}
	if d.Chunks > 1 {
		m.itl.Observe(d.Last.Sub(d.First).Seconds() / float64(d.Chunks-1))
	}
}

// count records the engine's counts in the index, where the next turn finds them, and as
// ratios of the model's kinds of text.
func (d *delivery) count(cached int64) {
	req := d.rt.plan.Request
	if req.Truncated || req.Kind == api.None {
		return
	}
	if req.Media == 0 && req.Kind == api.Text {
		d.learnRatios(req)
	}
	if req.Batch() {
		return
	}
	c := kvscore.Counts{Prompt: d.Prompt}
	if !req.SkipsCache && cached >= 0 {
		c.Cached, c.CachedTold = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = d.Past
	}
	if d.Completion > 0 && req.Choices == 1 && !d.Failed {
		c.Answer = d.Prompt + d.Completion - 1 // the last token need not be computed
	}
	d.attempt.lease.Counted(c)
}

// learnRatios learns from the part of the prompt that was new, if the engine's
// count of the other part is known, else from all of it. Of a batch, the first
// prompt's blocks stand for all.
func (d *delivery) learnRatios(req *api.Request) {
	k, size := d.attempt.prompt.known, d.rt.plan.TextBlock
	if !k.Counted || req.Batch() {
		k = kvscore.Known{}
	}
	all := float64(req.Bytes) / float64(size)
	past := all - float64(len(req.Blocks)) - k.Past
	d.rt.Pool.Ratios.Learn(req.Model, req.Blocks[k.Blocks:], past, size, float64(d.Prompt)-k.Tokens)
}

// verify compares the predicted cached tokens with the engine's count; cached is negative
// if that is unknown.
func (d *delivery) verify(cached int64) {
	a, rt := d.attempt, d.rt
	if a.prompt.tokens == 0 || d.Prompt <= 0 || cached < 0 || rt.plan.Score.SkipsCache {
		return
	}
	m := rt.Figures
	m.comparedPrompt.Add(float64(d.Prompt))
	m.comparedPredicted.Add(float64(a.terms.OverlapTokens))
	m.comparedReported.Add(float64(cached))
	rt.Pool.Verify(a.Worker, &pool.Prediction{Begun: a.Begun, Prompt: rt.blameKey(), Tokens: a.terms.OverlapTokens, Shared: a.terms.SharedBlocks}, cached)
}

// promptLength is the estimated length of a prompt when an attempt was booked.
type promptLength struct {
	tokens int64 // 0 is unknown
	known  kvscore.Known
}

// blameKey identifies the session, or else the prompt, that an error or a wrong
// prediction is held against: one client alone must not mark a worker. Requests without
// an API have one key, and those without a known prompt one each.
func (rt *Dispatch) blameKey() uint64 {
	switch {
	case rt.plan.API == nil:
		return 0
	case rt.plan.Session.Key != "":
		return xxh3.HashString(rt.plan.Session.Key)
	case len(rt.plan.Score.Blocks) == 0:
		return uint64(rt.ready.UnixNano()) //nolint:gosec // after 1970
	}
	key := rt.plan.Score.Root
	for _, b := range rt.plan.Score.Blocks {
		key = (bits.RotateLeft64(key, 5) ^ b) * 0x9e3779b97f4a7c15
	}
	return key
}
