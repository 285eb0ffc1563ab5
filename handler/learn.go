package handler

import (
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// learn records what the engine has counted in a prompt and its answer.
func (d *delivery) learn() {
	m, cached := d.rt.figures, d.cachedTokens()
	if d.prompt > 0 {
		m.inputTokens.Observe(float64(d.prompt))
		d.count(cached)
		if cached >= 0 {
			m.reportedHits.Observe(float64(cached) / float64(d.prompt))
			d.attempt.worker.hits.reported(cached, d.prompt)
		}
	}
	if d.completion >= 0 {
		m.outputTokens.Observe(float64(d.completion))
	}
	d.verify(cached)
	if d.cached >= 0 {
		d.rt.cached = d.cached
	}
	if d.chunks > 1 {
		m.itl.Observe(d.last.Sub(d.first).Seconds() / float64(d.chunks-1))
	}
}

// cachedTokens returns how many tokens of the prompt the engine had cached by what it
// reports, -1 if that is unknown. SGLang omits the count if it is 0, and in kinds of
// answers that have none: if another answer of the kind had one, it is 0.
func (d *delivery) cachedTokens() int64 {
	w := d.attempt.worker
	if w.engine.last().Type != engine.SGLang {
		return d.cached
	}
	if !w.cacheCheck.reported(reportKind{d.rt.plan.api.Name(), d.stream}, d.cached >= 0) {
		return -1
	}
	return max(d.cached, 0)
}

// count records the engine's counts in the index, where the next turn finds them, and as
// ratios of the model's kinds of text.
func (d *delivery) count(cached int64) {
	req := d.rt.plan.request
	if req.Truncated || req.Kind == api.None {
		return
	}
	if req.Media == 0 && req.Kind == api.Text {
		d.learnRatios(req)
	}
	if req.Batch() {
		return
	}
	c := kvscore.Counts{Prompt: d.prompt}
	if !req.SkipsCache && cached >= 0 {
		c.Cached, c.CachedTold = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = d.past
	}
	if d.completion > 0 && req.Choices == 1 && !d.failed {
		c.Answer = d.prompt + d.completion - 1 // the last token need not be computed
	}
	d.attempt.lease.Counted(c)
}

// learnRatios learns from the part of the prompt that was new, if the engine's
// count of the other part is known, else from all of it. Of a batch, the first
// prompt's blocks stand for all.
func (d *delivery) learnRatios(req *api.Request) {
	k, size := d.attempt.prompt.known, d.rt.plan.textBlock
	if !k.Counted || req.Batch() {
		k = kvscore.Known{}
	}
	all := float64(req.Bytes) / float64(size)
	past := all - float64(len(req.Blocks)) - k.Past
	d.rt.pool.ratios.Learn(req.Model, req.Blocks[k.Blocks:], past, size, float64(d.prompt)-k.Tokens)
}

// verify compares the predicted cached tokens with the engine's count; cached is negative
// if that is unknown.
func (d *delivery) verify(cached int64) {
	a, rt := d.attempt, d.rt
	if a.prompt.tokens == 0 || d.prompt <= 0 || cached < 0 || rt.plan.score.SkipsCache {
		return
	}
	m, predicted := rt.figures, a.terms.OverlapTokens
	m.comparedPrompt.Add(float64(d.prompt))
	m.comparedPredicted.Add(float64(predicted))
	m.comparedReported.Add(float64(cached))
	if off := max(predicted-cached, cached-predicted); predicted > 0 || cached > 0 { // else there was nothing to predict
		predictionErrors.WithLabelValues(rt.pool.name, a.worker.dial).Observe(float64(off))
		a.worker.misses.note(off, off <= rt.pool.page(a.worker))
	}
	// The engine may or may not find what is being computed for other requests.
	if cached*4 < predicted*3 {
		predicted -= int64(a.terms.SharedBlocks * float64(rt.pool.settings.Load().blockSize))
	}
	if a.worker.cacheCheck.compare(now(), a.begun, rt.blameKey(), predicted, cached) {
		rt.pool.clear(a.worker, clearedMismatch)
		a.worker.engine.askAgain()
	}
}
