package dispatch

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// delivery is the answer of an attempt on its way to the client. It listens to the answer's
// body and records what it shows of the worker.
type delivery struct {
	response.Summary // complete once the answer has ended
	d                *Dispatch
	attempt          *attempt
	body             *response.Body

	header    time.Time // when a plain answer's header came
	alive     time.Time // when the lease was last told of bytes
	refreshed time.Time // when the session's binding was
	tokens    int       // events with tokens so far
	waits     bool      // for the worker
}

// deliveryOf makes the delivery of an attempt's answer, whose body it replaces.
func (d *Dispatch) deliveryOf(a *attempt, resp *http.Response) *delivery {
	o := &delivery{d: d, attempt: a}
	opts := response.Options{Listener: o}
	if d.plan.Request != nil && resp.StatusCode < 300 {
		o.refreshed = time.Now()
		opts.Stream = body.MediaType(resp.Header) == body.EventStream
		if body.Compressed(resp.Header) { // although it was asked not to be
			d.FallBack(fallbackUnreadable)
		} else {
			opts.Request, opts.CutUsage = d.plan.Request, d.plan.AsksUsage
		}
		if d.Speculative && d.plan.Ext.AgentHints.SpeculativePrefill.Value {
			opts.KeepText = MaxKeptText
		}
		if a.guard != nil {
			opts.Ctx = a.guard.ctx
		}
		opts.Extras = d.extras(a, opts.Request != nil)
	}
	o.body = response.NewBody(resp, opts)
	o.Summary = o.body.Sum
	resp.Body = o.body
	return o
}

// extras returns the nvext that the answer carries; nil if none. What an answer cannot carry
// is counted.
func (d *Dispatch) extras(a *attempt, readable bool) *response.Extras {
	x := d.plan.Answer
	if x == nil {
		return nil
	}
	if !x.Fits || !readable {
		d.FallBack(fallbackUntold)
		return nil
	}
	e := &response.Extras{
		Fields: x.Fields, Annotations: x.Annotations, ID: x.ID, IDs: x.IDs, Prompt: x.Prompt,
		Worker: a.Target.Worker, Rank: a.Target.Rank, Waiting: x.Waiting, Received: d.start, Begun: a.Begun, HitRate: -1,
	}
	if d.Pool.EngineOf(a.Worker).Type == engine.Dynamo {
		e.Annotations = 0 // it gets the request's nvext, and writes them itself
	}
	if n := a.prompt.tokens; n > 0 {
		e.HitRate = float64(a.terms.OverlapTokens) / float64(n)
	}
	return e
}

// observe makes an attempt's answer the client's, and records what its header shows.
func (d *Dispatch) observe(req *http.Request, resp *http.Response) {
	a, noBody := d.attempt, req.Method == http.MethodHead || resp.Body == http.NoBody
	o := a.answer
	if o == nil {
		o = d.deliveryOf(a, resp)
	}
	d.answer = o
	t := time.Now()
	switch good := d.plan.Request != nil && resp.StatusCode < 300; {
	case o.Read && o.Stream: // its first token is still to come
	case o.Read:
		o.header = t // the answer was complete then, if it is one
	case good && !o.Stream:
		a.prefilled(t)
	default:
		a.lease.Prefilled(t) // whatever it was, it is over
	}
	if noBody {
		resp.Body = http.NoBody
		o.body.Finish()
	}
}

// prefilled records a first token. The prefills of a hung worker are not measured.
func (a *attempt) prefilled(t time.Time) {
	if a.Worker.Progress.IsHung() {
		a.lease.Prefilled(t)
	} else {
		a.lease.FirstToken(t)
	}
}

// Waits implements response.Listener.
func (o *delivery) Waits() {
	a := o.attempt
	o.waits = true
	a.Waiting.Store(true)
	if a.guard != nil && !o.alive.IsZero() {
		a.guard.await(true)
	}
}

// Received implements response.Listener. A long answer keeps its session alive.
func (o *delivery) Received(t time.Time, n, tokens int) {
	a := o.attempt
	if o.waits {
		o.waits = false
		a.Waiting.Store(false)
		if a.guard != nil {
			a.guard.await(false)
		}
	}
	if n > 0 && t.Sub(o.alive) > time.Second {
		o.alive = t
		a.lease.Alive(t)
	}
	if n > 0 && a.Work != pool.WorkNone && o.Status < 300 {
		a.Worker.Progress.LastOutput.Store(pool.Ticks(t))
	}
	if tokens == o.tokens {
		return
	}
	o.tokens = tokens
	a.lease.Output(t, int64(tokens))
	if o.d.session != "" && t.Sub(o.refreshed) > o.d.sessionTTL()/4 {
		o.refreshed = t
		o.d.refreshBinding()
	}
}

// FirstToken implements response.Listener.
func (o *delivery) FirstToken(t time.Time) {
	o.attempt.prefilled(t)
	o.d.Figures.ttft.Observe(t.Sub(o.d.start).Seconds())
	o.d.didWell(o.attempt)
}

// ResponseID implements response.Listener.
func (o *delivery) ResponseID(id string) {
	if !o.d.plan.Request.Unstored {
		o.d.Pool.Responses.Keep(id, o.attempt.lease.Target())
	}
}

// Ended implements response.Listener.
func (o *delivery) Ended(s response.Summary) {
	o.Summary = s
	if s.Skipped {
		o.d.FallBack(fallbackUntold)
	}
	if !s.Whole || !s.Read {
		return
	}
	switch a := o.attempt; {
	case s.Garbled:
		o.d.garbled(a)
		return
	case !s.First.IsZero(): // the first token has shown that the worker is well
	case s.Failed:
		o.d.erred(a, "an error as the answer, with a good status", false)
	default:
		if !s.Stream {
			completion := s.Completion
			if completion > 1 {
				completion = -1 // its time is that of these tokens, and says nothing of the prefill
			}
			a.lease.Answered(o.header, completion)
		}
		o.d.didWell(a)
	}
	o.learn()
}

// computed returns whether the worker has certainly computed the prompt.
func (o *delivery) computed() bool { return o != nil && o.Summary.Computed() }

// noticeEncoding records that a handler before this one compressed a stream. Only the response
// header shows that.
func (d *Dispatch) noticeEncoding(w http.ResponseWriter) {
	if o := d.answer; o != nil && o.Stream && o.Read && body.Compressed(w.Header()) {
		d.Pool.Incidents.Raise(time.Now(), "event streams leave compressed (keep encode away from them)", d.Pool.Logger)
	}
}

// tunnel is the connection after a 101. Nothing in it can be read, but bytes in either
// direction are signs of life: without them the lease expires as any other does.
type tunnel struct {
	io.ReadWriteCloser
	lease *kvscore.Lease
}

func (t *tunnel) Read(p []byte) (int, error) {
	n, err := t.ReadWriteCloser.Read(p)
	t.lease.Alive(time.Now())
	return n, err
}

func (t *tunnel) Write(p []byte) (int, error) {
	t.lease.Alive(time.Now())
	return t.ReadWriteCloser.Write(p)
}

// CloseWrite lets the proxy close one direction only.
func (t *tunnel) CloseWrite() error {
	if c, ok := t.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported // the proxy then closes both
}

// followUps makes requests of the router's own that follow those of clients.
type followUps interface {
	// Arrived is called with the plan of each request before a worker is chosen.
	Arrived(*plan.Plan)
	// Answering is called when an answer begins. It returns nil if nothing is to follow.
	// Else the request's body is kept.
	Answering(Turn, *http.Response) FollowUp
}

// FollowUp is called once, when a request has ended. text is that of an answer which
// came whole, as JSON; nil if it did not, or is not all text. The function owns the
// body. sent is what the worker was sent. All three are nil for an answer that the
// operator's configuration tries again.
type FollowUp func(text []byte, whole *body.Replay, sent *http.Request)

// Turn is a request whose answer begins.
type Turn struct {
	Plan     *plan.Plan
	Size     int64 // of its body; -1 if that is not in memory
	Worker   *pool.Worker
	Target   kvscore.Target
	Upstream *reverseproxy.Upstream
}

// MaxKeptText is the longest answer, in bytes of JSON, whose text is kept for what
// follows.
const MaxKeptText = 256 << 10

// foresee prepares what follows the request, when its answer begins.
func (d *Dispatch) foresee(resp *http.Response) {
	if d.next != nil { // of an answer that the operator has tried again
		d.next(nil, nil, nil)
	}
	t := Turn{Plan: d.plan, Size: -1, Worker: d.attempt.Worker, Target: d.attempt.Target, Upstream: d.last}
	if d.Body != nil {
		t.Size = d.Body.Size
	}
	d.next = d.FollowUps.Answering(t, resp)
}

// follow begins what follows the request, which has ended.
func (d *Dispatch) follow(outcome string) {
	if d.next == nil {
		return
	}
	var text []byte
	if o := d.answer; outcome == outcomeOK && o.computed() {
		text = o.Text
	}
	d.next(text, d.takeBody(), d.sent)
	d.next = nil
}

// learn records what the engine has counted in a prompt and its answer.
func (o *delivery) learn() {
	m := o.d.Figures
	cached := o.attempt.Worker.CachedTokens(pool.ReportKind{API: o.d.plan.API.Name(), Stream: o.Stream}, o.Cached)
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
