package dispatch

import (
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

// delivery is the answer of an attempt. It listens to the answer's body and records what that
// shows of the worker.
type delivery struct {
	response.Summary // complete once the answer has ended
	d                *Dispatch
	attempt          *attempt
	body             *response.Body

	header time.Time // when the header of an answer that is no stream came
	alive  time.Time // the lease's latest sign of life
	tokens int       // events with tokens so far
	waits  bool      // a read of the worker's next bytes is under way
}

// deliver prepares an answer for the client.
func (d *Dispatch) deliver(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.dropHeld()
	if d.foresee(resp); !d.KeepBody && d.next == nil {
		d.dropBody()
	}
	d.label(resp.Header, a)
	if resp.StatusCode == http.StatusSwitchingProtocols {
		a.lease.Prefilled(time.Now())
		a.lease.Hold() // a tunnel may be silent for as long as it is open
		return resp
	}
	had := d.bound.Target
	if resp.StatusCode < 300 {
		d.keepSession()
		d.commit(req.Context())
	} else if resp.StatusCode == http.StatusBadRequest {
		d.doubtSession()
	}
	d.use.Yield() // if commit has not bound the session, others need not wait for it
	d.noticeSession(resp.Header, had)
	if d.plan.Lists && !response.MergeModels(resp, d.Pool.ModelsBeside(a.Worker, d.workersOffered())) {
		d.FallBack(fallbackUnmerged)
	}
	d.observe(req, resp)
	return resp
}

// deliveryOf makes the delivery of an attempt's answer, and replaces the answer's body.
func (d *Dispatch) deliveryOf(a *attempt, resp *http.Response) *delivery {
	o := &delivery{d: d, attempt: a}
	opts := response.Options{Listener: o}
	if d.plan.Request != nil && resp.StatusCode < 300 {
		opts.Stream = body.MediaType(resp.Header) == body.EventStream
		if body.Compressed(resp.Header) {
			d.FallBack(fallbackUnreadable)
		} else {
			opts.Request, opts.CutUsage = d.plan.Request, d.plan.AsksUsage
		}
		if d.Speculative && d.plan.Ext.AgentHints.SpeculativePrefill.Value {
			opts.KeepText = MaxKeptText
		}
		if a.watch != nil {
			opts.Ctx = a.watch.ctx
		}
		opts.Extras = d.extras(a, opts.Request != nil)
	}
	o.body = response.NewBody(resp, opts)
	o.Summary = o.body.Sum
	resp.Body = o.body
	return o
}

// extras returns the nvext that the answer carries; nil if none. It counts what the answer
// cannot carry.
func (d *Dispatch) extras(a *attempt, readable bool) *response.Extras {
	x := d.plan.Answer
	if x == nil {
		return nil
	}
	if !x.Fits || !readable {
		d.FallBack(fallbackOmitted)
		return nil
	}
	e := &response.Extras{
		Fields: x.Fields, Annotations: x.Annotations, ID: x.ID, IDs: x.IDs, Prompt: x.Prompt,
		Worker: a.Target.Worker, Rank: a.Target.Rank, Waiting: x.Waiting, Received: d.start, Begun: a.Begun, HitRate: -1,
	}
	if to := a.Worker.Engine(); to.ReadsNVExt() {
		e.Annotations = 0 // it gets the request's nvext, and writes them itself
	}
	if n := a.prompt.tokens; n > 0 {
		e.HitRate = float64(a.terms.OverlapTokens) / float64(n)
	}
	return e
}

// observe delivers an attempt's answer, and records what its header shows.
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
		o.header = t // the answer was complete then
	case good && !o.Stream:
		a.prefilled(t)
	default:
		a.lease.Prefilled(t)
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

func (o *delivery) Waits() {
	a := o.attempt
	o.waits = true
	a.Waiting.Store(true)
	if a.watch != nil && !o.alive.IsZero() {
		a.watch.await(true)
	}
}

// Received implements response.Listener. A long answer keeps its session alive.
func (o *delivery) Received(t time.Time, n, tokens int) {
	a := o.attempt
	if o.waits {
		o.waits = false
		a.Waiting.Store(false)
		if a.watch != nil {
			a.watch.await(false)
		}
	}
	if n > 0 && t.Sub(o.alive) > time.Second {
		o.alive = t
		a.lease.Alive(t)
	}
	if n > 0 && a.Kind != pool.KindOther && o.Status < 300 {
		a.Worker.Progress.LastOutput.Store(pool.Ticks(t))
	}
	if tokens == o.tokens {
		return
	}
	o.tokens = tokens
	a.lease.Output(t, int64(tokens))
}

func (o *delivery) FirstToken(t time.Time) {
	o.attempt.prefilled(t)
	o.d.Figures.ttft.Observe(t.Sub(o.d.start).Seconds())
	o.d.Pool.Report(o.attempt.Worker, o.d.good(o.attempt))
}

func (o *delivery) ResponseID(id string) {
	if o.d.plan.Request.Unstored {
		return
	}
	session := o.d.plan.Session.Identity
	if session == (affinity.Identity{}) {
		session = o.d.Pool.Secret.Identity(id) // the response begins a conversation
	}
	o.d.Pool.Responses.Keep(id, o.attempt.lease.Target(), session)
}

func (o *delivery) Ended(s response.Summary) {
	o.Summary = s
	if s.Skipped {
		o.d.FallBack(fallbackOmitted)
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
		o.d.doubtSession()
		o.d.Pool.Report(a.Worker, o.d.errored(a, "an error in an answer with status 2xx", false))
	default:
		if !s.Stream {
			completion := s.Completion
			if completion > 1 {
				completion = -1 // most of its time went to these tokens, not to the prefill
			}
			a.lease.Answered(o.header, completion)
		}
		o.d.Pool.Report(a.Worker, o.d.good(a))
	}
	o.learn()
}

// computed returns whether the worker has certainly computed the prompt.
func (o *delivery) computed() bool { return o != nil && o.Summary.Computed() }

// noticeEncoding records that a handler before this one compressed a stream. Only the response
// header shows that.
func (d *Dispatch) noticeEncoding(w http.ResponseWriter) {
	if o := d.answer; o != nil && o.Stream && o.Read && body.Compressed(w.Header()) {
		d.Pool.Incidents.Raise(time.Now(), "event streams are compressed: exclude them from encode", d.Pool.Logger)
	}
}
