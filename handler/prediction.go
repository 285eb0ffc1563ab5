package handler

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
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
	a := o.attempt
	if a.prompt.tokens == 0 || prompt <= 0 || cached < 0 || o.rt.plan.score.SkipsCache {
		return
	}
	m, predicted := o.rt.figures, a.terms.OverlapTokens
	m.comparedPrompt.Add(float64(prompt))
	m.comparedPredicted.Add(float64(predicted))
	m.comparedReported.Add(float64(cached))
	if off := max(predicted-cached, cached-predicted); predicted > 0 || cached > 0 { // else there was nothing to predict
		o.rt.metrics.predictionError.WithLabelValues(o.rt.pool.name, a.worker.dial).Observe(float64(off))
		a.worker.misses.note(off, off <= o.rt.pool.page(a.worker))
	}
	// What is being computed for others may or may not be found, by the engine.
	if cached*4 < predicted*3 {
		predicted -= int64(a.terms.SharedBlocks * float64(o.rt.pool.settings.Load().blockSize))
	}
	if a.worker.cacheCheck.compare(now(), a.begun, o.rt.promptKey(), predicted, cached) {
		o.rt.pool.clear(a.worker, clearedMismatch)
		a.worker.engine.askAgain()
	}
}

// page returns how many tokens a block has that the worker's engine reuses whole,
// as it tells, else as prompts are compared.
func (p *pool) page(w *worker) int64 {
	if n := w.engine.last().BlockSize; n > 0 {
		return int64(n)
	}
	return int64(p.settings.Load().blockSize)
}

// keptMisses is how many errors are kept.
const keptMisses = 512

// misses keeps the errors of the last predictions, in tokens.
type misses struct {
	mu     sync.Mutex
	off    [keptMisses]int32 // a ring
	within [keptMisses]bool  // one of the engine's blocks
	n      int
}

func (m *misses) note(off int64, within bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := m.n % keptMisses
	m.off[i], m.within[i] = int32(min(off, most-1)), within
	m.n++
}

// missesView summarizes how far the predicted cached tokens of the last answers
// were from those that the engine reported.
type missesView struct {
	Answers     int     `json:"answers"`
	P50         int32   `json:"p50_tokens"`
	P90         int32   `json:"p90_tokens"`
	P99         int32   `json:"p99_tokens"`
	WithinBlock float64 `json:"share_within_one_block"`
}

// view returns nil while there were no answers to compare.
func (m *misses) view() *missesView {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := min(m.n, keptMisses)
	if n == 0 {
		return nil
	}
	off, within := slices.Sorted(slices.Values(m.off[:n])), 0
	for _, is := range m.within[:n] {
		if is {
			within++
		}
	}
	at := func(q float64) int32 { return off[min(int(q*float64(n)), n-1)] }
	return &missesView{n, at(0.5), at(0.9), at(0.99), float64(within) / float64(n)}
}

// hits are sums over the prompts that a worker has computed, in tokens.
type hits struct {
	foreseen, estimated atomic.Int64
	cached, prompt      atomic.Int64
}

func (h *hits) predicted(cached, prompt int64) {
	h.foreseen.Add(cached)
	h.estimated.Add(prompt)
}

func (h *hits) reported(cached, prompt int64) {
	h.cached.Add(cached)
	h.prompt.Add(prompt)
}
