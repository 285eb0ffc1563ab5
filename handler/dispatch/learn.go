package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// learn feeds the engine's usage into metrics, ratios and the cache check.
func (o *delivery) learn() {
	m := &o.d.Series
	kind := worker.ReportKind{API: o.d.plan.API.Name(), Stream: o.Stream}
	cached := int64(-1)
	if o.phases == nil { // else the prefill phase has reported it
		cached = o.attempt.Worker.CachedTokens(kind, o.Cached)
	}
	if o.Prompt > 0 {
		m.inputTokens.Observe(float64(o.Prompt))
	}
	if !o.d.Holds() {
		learnPrompt(o.attempt, &o.Summary, cached)
	}
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

// learnPrompt feeds the engine's counts into the index, for the next turn. It feeds them into the ratios of the
// model and the check of the cache, too. cached is negative if unknown.
func learnPrompt(a *attempt.Attempt, s *response.Summary, cached int64) {
	if s.Prompt <= 0 || a.Worker.IsBackup() { // whose tokenizer and cache may be others
		return
	}
	p, e := a.Call.Plan, a.Worker.Engine()
	knows := a.Worker.Ranks() < 2 || e.TakesRankIn(p.API.Name()) // else the engine has chosen the rank
	if a.Prefill == nil {
		verify(a, s.Prompt, cached, knows)
	}
	req := p.Request
	if req.Truncated || req.Kind == api.None {
		return
	}
	if req.Media == 0 && req.Kind == api.Text {
		// The new part of the prompt counts if the engine's count of the rest is known, else all of it. A batch's
		// first prompt stands for all.
		k, size := a.Known, p.TextBlock
		if !k.Counted || req.Batch() {
			k = kvscore.Known{}
		}
		past := float64(req.Bytes)/float64(size) - float64(len(req.Blocks)) - k.Past
		a.Call.Pool.Ratios.Learn(req.Model, req.Blocks[k.Blocks:], past, size, float64(s.Prompt)-k.Tokens)
	}
	if req.Batch() {
		return
	}
	c := kvscore.Counts{Prompt: s.Prompt}
	if !req.SkipsCache && cached >= 0 && knows {
		c.Cached, c.CachedReported = cached, true
	}
	if req.Kind == api.Text { // the index knows where token ids end
		c.AnswerPast = s.Past
	}
	if s.Completion > 0 && req.Choices == 1 && !s.Failed {
		c.Answer = s.Prompt + s.Completion - 1 // the last token need not be computed
	}
	a.Counted(c)
}

// verify compares the predicted cached tokens with the engine's count; cached is negative if
// unknown. knows: the attempt's target has computed them, and no other rank.
func verify(a *attempt.Attempt, prompt, cached int64, knows bool) {
	p := a.Call.Plan
	if a.Tokens == 0 || p.Score.SkipsCache {
		return
	}
	block := a.Call.Pool.Settings.Load().BlockSize
	predicted := &worker.Prediction{
		Prompt: a.CulpritKey(), Tokens: a.Terms.OverlapTokens,
		Shared: a.Terms.SharedBlocks, Knowledge: a.Terms.Knowledge,
	}
	if p.API.Work() == api.Generate {
		a.Worker.CountedCache(predicted, cached >= 0, block)
	}
	if cached < 0 || !knows {
		return
	}
	a.Counts().Compared(prompt, a.Terms.OverlapTokens, cached)
	a.Worker.Verify(predicted, cached, block)
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
		predictedRatios.WithLabelValues(d.Pool.Name, class.Name).Observe(predicted.Seconds() / max(actual.Seconds(), 1e-3))
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
		promisesTotal.WithLabelValues(d.Pool.Name, d.plan.Class.Name, outcome).Inc()
		d.Pool.Outcomes.Count(time.Now(), d.plan.Class.Name, outcome)
	}
}
