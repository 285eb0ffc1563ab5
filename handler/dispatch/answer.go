package dispatch

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

func (d *Dispatch) deliver(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.held.drop()
	if !a.Streams(resp) {
		d.split.Answered(d.phases, resp.StatusCode < 300)
	}
	d.followUp = d.FollowUps(a, d.turn.EngineSession() != "", resp)
	// The body is kept for a stream that may go on elsewhere. Bodies of streams have half of the memory for
	// bodies, so that there is room for those of new requests.
	if !a.Streams(resp) || body.Compressed(resp.Header) || resp.ContentLength >= 0 || d.Body == nil || !d.mayGoOn() ||
		d.Pool.Memory.Held.Load() > body.MaxBytes()/2 {
		a.ForbidMove()
		d.freeBody()
	}
	a.Label(resp.Header, d.start, d.wait.waited)
	if d.OwnLimits {
		maps.DeleteFunc(resp.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "X-Ratelimit-") })
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		a.Prefilled(time.Now())
		a.Hold() // a tunnel may be silent for as long as it is open
		return resp
	}
	d.commit(req.Context(), resp)
	if d.plan.Lists && !response.MergeModels(resp, d.Pool.ModelsBeside(a.Worker, d.offers), d.plan.Models.List) {
		d.FallBack(fallbackUnmerged)
	}
	d.turn.KeepNamed(resp, a.Target)
	d.observe(req, resp)
	return resp
}

// commit binds the session to the target of a good answer. It counts what became of the session,
// and says it in the response headers.
func (d *Dispatch) commit(ctx context.Context, resp *http.Response) {
	a := d.attempt
	bound, _ := d.turn.BoundTarget()
	good := resp.StatusCode < 300
	d.turn.BindOpened(resp, a.Target)
	state := d.turn.Commit(a.Target, good)
	if good && d.turn.EngineSession() != "" { // opened by this request: no other worker may serve it from now on
		d.fixed = &fixed{worker: a.Worker, rank: nvext.Some(a.Target.Rank), reason: ReasonSession}
	}
	if state == turn.None {
		return
	}
	turnsTotal.WithLabelValues(d.Pool.Name, string(state)).Inc()
	if state == turn.Moved {
		why := movedCost
		switch w, want := d.offers.Worker(bound.Worker), d.Wants(); {
		case w == nil:
			why = movedGone
		case w == a.Worker: // another rank
		case w.IsShort(want.Prompt, want.Answer), d.beyond > 0 && slices.Contains(d.unfit, w):
			why = movedContext
		case slices.Contains(d.tried, w):
			why = movedFailed
		case !w.TakesRequests(a.Begun):
			why = movedUnavailable
		}
		movesTotal.WithLabelValues(d.Pool.Name, why).Inc()
	}
	if d.Labels != "" {
		resp.Header.Set(d.Labels+"Session-Source", d.plan.Session.Source)
		resp.Header.Set(d.Labels+"Session-State", string(state))
	}
}

// deliveryOf makes the delivery of an attempt's answer, and replaces the answer's body.
func (d *Dispatch) deliveryOf(a *attempt.Attempt, resp *http.Response) *delivery {
	o := &delivery{d: d, attempt: a, phases: d.phases}
	opts := response.Options{Listener: o, NameAt: "model"}
	if d.plan.HTTP.Method == http.MethodGet && plan.NameInPath(d.plan.HTTP.URL.Path, d.plan.Public).Len() > 0 {
		opts.NameAt = "id" // of the description of a model
	}
	if resp.StatusCode < 300 && resp.StatusCode != http.StatusPartialContent && !body.Compressed(resp.Header) {
		opts.Name = attempt.PublicName(d.plan, a.Worker)
	}
	if d.plan.Request != nil && resp.StatusCode < 300 {
		opts.Stream = body.MediaType(resp.Header) == body.EventStream
		if body.Compressed(resp.Header) {
			d.FallBack(fallbackUnreadable)
		} else {
			opts.Request, opts.CutUsage = d.plan.Request, d.plan.AsksUsage
			opts.CutIDs = d.cutIDs
		}
		if d.followUp != nil {
			opts.KeepText = MaxKeptText
		}
		opts.Ctx = a.Context()
		switch x := d.plan.Answer; {
		case x == nil:
		case !x.Fits || opts.Request == nil:
			d.FallBack(fallbackOmitted)
		default:
			opts.Extras = extras(x, a, d.phases, d.start)
		}
		if opts.Request != nil && opts.Stream && d.mayGoOn() {
			opts.Mover = o
		}
	}
	if opts.Stream && d.ServerTiming && resp.Trailer == nil {
		resp.Trailer = make(http.Header) // unannounced: else it would repeat the header's values
		o.trailer = resp.Trailer
	}
	o.body = response.NewBody(resp, opts)
	o.Summary = o.body.Sum
	resp.Body = o.body
	return o
}

// extras returns the nvext that the answer of an attempt carries.
func extras(x *plan.AnswerExt, a *attempt.Attempt, phases *split.Phases, received time.Time) *response.Extras {
	e := &response.Extras{
		Fields: x.Fields, Events: x.Events, IDs: x.IDs,
		Worker: a.Target.Worker, Rank: a.Target.Rank, Waiting: x.Waiting, Received: received, Begun: a.Begun, HitRate: -1,
	}
	if to := a.Worker.Engine(); to.ReadsNVExt() {
		e.Events = nil // it gets the request's nvext, and writes them itself
	}
	by := a.Computes()
	if n := by.Tokens; n > 0 {
		e.HitRate = float64(by.Terms.OverlapTokens) / float64(n)
	}
	if e.Prefill, e.PrefillRank = by.Target.Worker, by.Target.Rank; a.Prefill != nil {
		e.Begun, e.Prefilled = by.Begun, phases.Prefilled
	}
	return e
}

// observe delivers an attempt's answer, and records what its header shows.
func (d *Dispatch) observe(req *http.Request, resp *http.Response) {
	a, noBody := d.attempt, req.Method == http.MethodHead || resp.Body == http.NoBody
	o := d.deliveryOf(a, resp)
	d.answer = o
	t := time.Now()
	switch good := d.plan.Request != nil && resp.StatusCode < 300; {
	case o.Read && o.Stream: // its first token is still to come
	case o.Read:
		o.header = t // the answer was complete then
	case good && !o.Stream:
		a.FirstToken(t)
	case resp.StatusCode >= 400 && !attempt.Retryable(resp.StatusCode) && !slices.Contains(d.unfit, a.Worker):
		a.Failed(t, resp.StatusCode)
	default:
		a.Prefilled(t)
	}
	if noBody {
		resp.Body = http.NoBody
		o.body.Finish()
	}
}

func (o *delivery) Waits() {
	a := o.attempt
	o.waits = true
	a.Seat.Waits(true)
	if !o.alive.IsZero() {
		a.Await(true)
	}
}

// Received implements response.Listener. A long answer keeps its session alive.
func (o *delivery) Received(t time.Time, n, tokens int, begun bool) {
	a := o.attempt
	if begun && o.before == 0 {
		a.StopFirst()
	}
	if o.waits {
		o.waits = false
		a.Seat.Waits(false)
		a.Await(false)
	}
	if n > 0 && t.Sub(o.alive) > time.Second {
		o.alive = t
		a.Alive(t)
	}
	if n > 0 && o.Status < 300 {
		a.Progress(t)
	}
	if tokens == o.tokens {
		return
	}
	if o.moved > 0 && o.tokens == o.before { // of the rest
		a.StopFirst()
		a.FirstToken(t)
		o.d.Pool.Report(a.Worker, a.Shows(worker.OutcomeGood, ""))
	}
	o.tokens = tokens
	a.Output(t, int64(tokens-o.before))
}

func (o *delivery) FirstToken(t time.Time) {
	d, a := o.d, o.attempt
	o.phases.Transferred()
	goesOn := d.Body != nil && d.mayGoOn()
	if goesOn && o.phases.CancelUnsafe() && o.moved < d.Resume.Tries {
		a.MayMove()
	}
	d.split.Answered(o.phases, true)
	// The rest of a stream without a token can come from any engine.
	if goesOn && !resume.IsPossible(d.offers, a.Worker, d.plan.API.Name(), d.exact) {
		o.PinStream()
	}
	a.FirstToken(t)
	a.Counts().FirstToken(t, t.Sub(a.Begun))
	if o.trailer != nil {
		o.trailer.Set(attempt.ServerTiming, attempt.Timing("ttft", t.Sub(d.start)))
	}
	d.Series.ttft.Observe(t.Sub(d.start).Seconds())
	d.compare(&a.Seat, t)
	d.Pool.Report(a.Worker, a.Shows(worker.OutcomeGood, ""))
}

func (o *delivery) ResponseID(id string) {
	o.d.turn.KeepResponse(id, o.attempt.Target)
}

func (o *delivery) Ended(s response.Summary) {
	d, a := o.d, o.attempt
	o.Summary = s
	d.Pool.Memory.Held.Add(-o.room)
	o.room = 0
	if s.Skipped {
		d.FallBack(fallbackOmitted)
	}
	if !s.Whole || !s.Read {
		return
	}
	switch {
	case s.Malformed: // perhaps by the fault of others; a worker that gives only such answers is failing
		d.FallBack(fallbackUnreadable)
		a.Failed(time.Now(), 0)
		d.Pool.Report(a.Worker, a.Errored("the answer does not match its content type", true))
		d.turn.Forget(a.Target)
		return
	case !s.First.IsZero(): // the first token has shown that the worker is well
	case s.Failed && o.reported: // see Move
	case s.Failed:
		a.Failed(time.Now(), s.ErrorStatus)
		shown := a.Shows(worker.OutcomeAnswered, "")
		if attempt.WorkersFault(s.ErrorStatus) {
			shown = a.Errored(errorWithin, false)
		}
		d.Pool.Report(a.Worker, shown)
	default:
		if s.Stream || s.Completion == 0 && d.plan.API.Work() == api.Generate { // without a token
			a.Failed(time.Now(), 0)
		} else {
			completion := s.Completion
			if completion > 1 {
				completion = -1 // most of its time went to these tokens, not to the prefill
			}
			a.Answered(o.header, completion)
		}
		d.Pool.Report(a.Worker, a.Shows(worker.OutcomeGood, ""))
	}
	if o.moved == 0 { // two engines' figures show nothing of either
		o.learn()
	}
}

// errorWithin is what marks a worker down whose answers end with errors.
const errorWithin = "an error in an answer with status 2xx"
