package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// learn feeds the engine's usage into metrics, ratios and the cache check.
func (o *delivery) learn() {
	m := o.d.PoolMetrics
	kind := worker.ReportKind{API: o.d.plan.API.Name(), Stream: o.Stream}
	cached := int64(-1)
	if o.phases == nil { // else the prefill phase has told
		cached = o.attempt.Worker.CachedTokens(kind, o.Cached)
	}
	if o.Prompt > 0 {
		m.inputTokens.Observe(float64(o.Prompt))
	}
	o.learnPrompt(cached)
	if o.Completion >= 0 {
		o.attempt.Counts().Generated(o.Completion)
		m.outputTokens.Observe(float64(o.Completion))
	}
	if o.Cached >= 0 {
		o.d.cached = o.Cached
	}
	if !o.Stream && !o.Failed && o.Status < 300 {
		m.plain.Observe(o.header.Sub(o.d.start).Seconds())
		o.attempt.Counts().Answered(o.header, o.header.Sub(o.attempt.Begun), o.Completion)
		o.d.promised(promisePlain)
	}
	if o.Chunks > 1 {
		mean := o.Last.Sub(o.First) / time.Duration(o.Chunks-1)
		o.attempt.Counts().Pace(mean)
		m.itl.Observe(mean.Seconds())
	}
}

// learnPrompt feeds the engine's counts of the prompt into the index, the ratios and the check of the
// cache; cached is negative if unknown.
func (o *delivery) learnPrompt(cached int64) {
	if o.Prompt <= 0 || o.d.Holds() || o.attempt.Worker.IsBackup() { // whose tokenizer and cache may be others
		return
	}
	o.count(cached)
	if o.phases == nil {
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
		Prompt: a.BlameKey(), Tokens: a.Terms.OverlapTokens,
		Shared: a.Terms.SharedBlocks, Knowledge: a.Terms.Knowledge,
	}
	if d.plan.API.Work() == api.Generate {
		a.Worker.CountedCache(predicted, cached >= 0, block)
	}
	if cached < 0 || !o.knowsRank() {
		return
	}
	a.Counts().Compared(o.Prompt, a.Terms.OverlapTokens, cached)
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

// compare compares the first token of a stream with its prediction, and with its class's target.
func (d *Dispatch) compare(s *pool.Seat, t time.Time) {
	class := d.plan.Class
	if class == nil {
		return
	}
	actual := t.Sub(d.ready)
	switch {
	case s.Demoted:
		d.promised(promiseDemoted)
	case actual > d.plan.TTFT:
		d.promised(promiseLate)
	default:
		d.promised(promiseKept)
	}
	if predicted := s.Predicted.Sub(d.ready); d.attempts == 1 && predicted > 0 && !s.Demoted && !s.Worker.IsBackup() {
		d.Pool.Promises.Compare(class.Name, d.plan.TTFT, predicted, actual, t)
		d.Metrics.predictions.WithLabelValues(d.Pool.Name, class.Name).Observe(predicted.Seconds() / max(actual.Seconds(), 1e-3))
	}
}

// Outcomes of requests whose class has a target of the time to the first token.
const (
	promiseKept    = "kept"
	promiseLate    = "late"    // also a stream that ended after its target and without a first token
	promisePlain   = "plain"   // the answer was no stream
	promiseDemoted = "demoted" // it got another class, as it would have been late
	promiseRefused = "refused" // as it would have been late
)

// Served are those of them whose request was served. The others in [observe.Outcomes] are refusals.
var Served = []string{promiseKept, promiseLate, promisePlain, promiseDemoted}

// promised counts such a request.
func (d *Dispatch) promised(outcome string) {
	if d.plan.Class != nil && d.plan.TTFT > 0 {
		d.Metrics.promises.WithLabelValues(d.Pool.Name, d.plan.Class.Name, outcome).Inc()
		d.Pool.Outcomes.Count(time.Now(), d.plan.Class.Name, outcome)
	}
}

// promisedInVain counts a stream that has ended late and without a first token: its client left, or no worker had a
// free slot.
func (d *Dispatch) promisedInVain() {
	req, o, away := d.plan.Request, d.answer, d.wait.turnedAway
	if req != nil && req.Stream && (o == nil || o.First.IsZero()) && (away == nil || away.Code != api.CodeLate) && time.Since(d.ready) > d.plan.TTFT {
		d.promised(promiseLate)
	}
}
