package dispatch

import (
	"encoding/binary"
	"math/bits"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// shows returns what an attempt has shown of its worker. docs/reliability.md shows when
// traffic moves away.
func (a *attempt) shows(kind pool.OutcomeKind, why string) pool.Outcome {
	return pool.Outcome{Kind: kind, Begun: a.Begun, Why: why}
}

// end counts the attempt by its outcome, once. failed: by its worker's fault, as far as the router
// knows.
func (a *attempt) end(outcome string, failed bool) {
	if !a.ended.Swap(true) {
		a.counts.Ended(outcome, failed)
	}
}

// good returns the outcome of an attempt with a good answer.
func (a *attempt) good() pool.Outcome {
	if !a.d.plan.ShowsHealth || a.legs.over() { // the worker has not answered
		return a.shows(pool.OutcomeAnswered, "")
	}
	return a.shows(pool.OutcomeGood, "")
}

// errored returns the outcome of an attempt whose answer is an error, which may be the
// worker's fault. own: the error is probably not the client's fault.
func (a *attempt) errored(why string, own bool) pool.Outcome {
	d := a.d
	if !d.plan.ShowsHealth {
		return a.shows(pool.OutcomeAnswered, "")
	}
	o := a.shows(pool.OutcomeErrored, why)
	o.Own, o.Blame, o.Peers = own, a.blameKey(), d.offers.Table.Rows
	return o
}

// failed records that the answer is an error or empty. Not all requests show the worker's health.
func (a *attempt) failed(t time.Time) {
	if a.d.plan.ShowsHealth {
		a.Failed(t)
	} else {
		a.Prefilled(t)
	}
}

// garbled records an answer that does not match its content type. The session leaves the
// worker. One such answer may have other causes; a worker that gives only such answers is
// failing.
func (a *attempt) garbled() {
	d := a.d
	d.FallBack(fallbackUnreadable)
	a.failed(time.Now())
	d.Pool.Report(a.Worker, a.errored("the answer does not match its content type", true))
	d.turn.Forget(a.Target)
}

// blameKey identifies the session or prompt of an error: one client alone must not mark a
// worker down. Requests without an API share one key. Each request without a known prompt has
// its own.
func (a *attempt) blameKey() uint64 {
	d := a.d
	const blamedBlocks = 64 // of a long prompt, about
	switch {
	case d.plan.API == nil:
		return 0
	case !d.plan.Session.Key.IsZero():
		return binary.LittleEndian.Uint64(d.plan.Session.Key[:]) // a hash already
	case len(d.plan.Score.Blocks) == 0:
		return uint64(d.ready.UnixNano()) //nolint:gosec // after 1970
	}
	key, blocks := d.plan.Score.Root, d.plan.Score.Blocks
	for i := len(blocks) - 1; i >= 0; i -= 1 + len(blocks)/blamedBlocks { // from the last, where prompts differ
		key = (bits.RotateLeft64(key, 5) ^ blocks[i]) * 0x9e3779b97f4a7c15
	}
	return key
}

// learn feeds the engine's usage into metrics, ratios and the cache check.
func (o *delivery) learn() {
	m := o.d.PoolMetrics
	kind := worker.ReportKind{API: o.d.plan.API.Name(), Stream: o.Stream}
	cached := int64(-1)
	if o.attempt.legs == nil { // else the prefill leg has told
		cached = o.attempt.Worker.CachedTokens(kind, o.Cached)
	}
	if o.Prompt > 0 {
		m.inputTokens.Observe(float64(o.Prompt))
	}
	o.learnPrompt(cached)
	if o.Completion >= 0 {
		o.attempt.counts.Generated(o.Completion)
		m.outputTokens.Observe(float64(o.Completion))
	}
	if o.Cached >= 0 {
		o.d.cached = o.Cached
	}
	if o.Chunks > 1 {
		mean := o.Last.Sub(o.First) / time.Duration(o.Chunks-1)
		o.attempt.counts.Pace(mean)
		m.itl.Observe(mean.Seconds())
	}
}

// learnPrompt feeds the engine's counts of the prompt into the index, the ratios and the check of the
// cache; cached is negative if unknown.
func (o *delivery) learnPrompt(cached int64) {
	if o.Prompt <= 0 || o.d.holds() {
		return
	}
	o.count(cached)
	if o.attempt.legs == nil {
		o.verify(cached)
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
	if !req.SkipsCache && cached >= 0 && o.knowsRank() {
		c.Cached, c.CachedReported = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = o.Past
	}
	if o.Completion > 0 && req.Choices == 1 && !o.Failed {
		c.Answer = o.Prompt + o.Completion - 1 // the last token need not be computed
	}
	o.attempt.Counted(c)
}

// learnRatios learns from the new part of the prompt, if the engine's count of the rest is
// known, else from all of it. A batch's first prompt stands for all.
func (o *delivery) learnRatios(req *api.Request) {
	k, size := o.attempt.Known, o.d.plan.TextBlock
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
	if a.Tokens == 0 || d.plan.Score.SkipsCache {
		return
	}
	block := d.Pool.Settings.Load().BlockSize
	predicted := &worker.Prediction{
		Prompt: a.blameKey(), Tokens: a.Terms.OverlapTokens,
		Shared: a.Terms.SharedBlocks, Knowledge: a.Terms.Knowledge,
	}
	if d.plan.API.Work() == api.Generate {
		a.Worker.CountedCache(predicted, cached >= 0, block)
	}
	if cached < 0 || !o.knowsRank() {
		return
	}
	a.counts.Compared(o.Prompt, a.Terms.OverlapTokens, cached)
	a.Worker.Verify(predicted, cached, block)
}

// knowsRank returns whether the attempt's target has computed the request. It is false if the
// engine has several ranks and chooses among them itself.
func (o *delivery) knowsRank() bool {
	w := o.attempt.Worker
	if w.Ranks() < 2 {
		return true
	}
	e := w.Engine()
	return e.TakesRankIn(o.d.plan.API.Name())
}
