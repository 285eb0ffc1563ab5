package dispatch

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
)

func (d *Dispatch) deliver(req *http.Request, resp *http.Response) *http.Response {
	a := d.attempt
	d.held.drop()
	if !a.Streams(resp) {
		d.split.Answered(d.phases, resp.StatusCode < 300)
	}
	if d.followUp = d.FollowUps(a, d.turn.EngineSession() != "", resp); !d.keepsBody(resp) {
		a.Stay()
		d.freeBody()
	}
	d.label(a, resp)
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
	d.keepNamed(resp)
	d.observe(req, resp)
	return resp
}

// deliveryOf makes the delivery of an attempt's answer, and replaces the answer's body.
func (d *Dispatch) deliveryOf(a *attempt.Attempt, resp *http.Response) *delivery {
	o := &delivery{d: d, attempt: a, phases: d.phases}
	opts := response.Options{Listener: o, NameAt: d.nameAt()}
	if resp.StatusCode < 300 && resp.StatusCode != http.StatusPartialContent && !body.Compressed(resp.Header) {
		opts.Name = a.PublicName()
	}
	if d.plan.Request != nil && resp.StatusCode < 300 {
		opts.Stream = body.MediaType(resp.Header) == body.EventStream
		if body.Compressed(resp.Header) {
			d.FallBack(fallbackUnreadable)
		} else {
			opts.Request, opts.CutUsage = d.plan.Request, d.plan.AsksUsage
			opts.CutIDs = d.cutIDs
		}
		if d.Speculative && d.plan.Ext.AgentHints.SpeculativePrefill.Value {
			opts.KeepText = MaxKeptText
		}
		opts.Ctx = a.Context()
		opts.Extras = d.extras(a, opts.Request != nil)
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

// nameAt returns the member of the answer that has the model's name: its id in the description of a model.
func (d *Dispatch) nameAt() string {
	if d.plan.HTTP.Method == http.MethodGet && plan.NameInPath(d.plan.HTTP.URL.Path, d.plan.Public).Len() > 0 {
		return "id"
	}
	return "model"
}

// extras returns the nvext that the answer carries; nil if none. It counts what the answer
// cannot carry.
func (d *Dispatch) extras(a *attempt.Attempt, readable bool) *response.Extras {
	x := d.plan.Answer
	if x == nil {
		return nil
	}
	if !x.Fits || !readable {
		d.FallBack(fallbackOmitted)
		return nil
	}
	e := &response.Extras{
		Fields: x.Fields, Events: x.Events, IDs: x.IDs,
		Worker: a.Target.Worker, Rank: a.Target.Rank, Waiting: x.Waiting, Received: d.start, Begun: a.Begun, HitRate: -1,
	}
	if to := a.Worker.Engine(); to.ReadsNVExt() {
		e.Events = nil // it gets the request's nvext, and writes them itself
	}
	by := a.Computes()
	if n := by.Tokens; n > 0 {
		e.HitRate = float64(by.Terms.OverlapTokens) / float64(n)
	}
	if e.Prefill, e.PrefillRank = by.Target.Worker, by.Target.Rank; a.Prefill != nil {
		e.Begun, e.Prefilled = by.Begun, d.phases.Prefilled
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
func (o *delivery) Received(t time.Time, n, tokens int) {
	a := o.attempt
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
		o.d.Pool.Report(a.Worker, a.Good())
	}
	o.tokens = tokens
	a.Output(t, int64(tokens-o.before))
}

// Begun implements response.Listener.
func (o *delivery) Begun() { o.attempt.StopFirst() }

func (o *delivery) FirstToken(t time.Time) {
	o.phases.Got()
	if o.phases.CancelUnsafe() && o.d.goesOn() && o.moved < o.d.Resume.Tries {
		o.attempt.MayMove()
	}
	o.d.split.Answered(o.phases, true)
	o.begin()
	o.attempt.FirstToken(t)
	o.attempt.Counts().FirstToken(t, t.Sub(o.attempt.Begun))
	if o.trailer != nil {
		o.trailer.Set(serverTiming, timing("ttft", t.Sub(o.d.start)))
	}
	o.d.PoolMetrics.ttft.Observe(t.Sub(o.d.start).Seconds())
	o.d.compare(&o.attempt.Seat, t)
	o.d.Pool.Report(o.attempt.Worker, o.attempt.Good())
}

func (o *delivery) ResponseID(id string) {
	o.d.turn.KeepResponse(id, o.attempt.Target)
}

func (o *delivery) Ended(s response.Summary) {
	o.Summary = s
	o.d.Pool.Memory.Held.Add(-o.room)
	o.room = 0
	if s.Skipped {
		o.d.FallBack(fallbackOmitted)
	}
	if !s.Whole || !s.Read {
		return
	}
	switch a := o.attempt; {
	case s.Malformed:
		o.d.malformed()
		return
	case !s.First.IsZero(): // the first token has shown that the worker is well
	case s.Failed && o.told: // see Move
	case s.Failed:
		a.Failed(time.Now(), s.ErrorStatus)
		shown := a.Shows(pool.OutcomeAnswered, "")
		if attempt.WorkersFault(s.ErrorStatus) {
			shown = a.Errored(errorWithin, false)
		}
		o.d.Pool.Report(a.Worker, shown)
	default:
		if s.Stream || s.Completion == 0 && o.d.plan.API.Work() == api.Generate { // without a token
			a.Failed(time.Now(), 0)
		} else {
			completion := s.Completion
			if completion > 1 {
				completion = -1 // most of its time went to these tokens, not to the prefill
			}
			a.Answered(o.header, completion)
		}
		o.d.Pool.Report(a.Worker, a.Good())
	}
	if o.moved == 0 { // two engines' figures show nothing of either
		o.learn()
	}
}

// errorWithin is what marks a worker down whose answers end with errors.
const errorWithin = "an error in an answer with status 2xx"

// malformed records an answer that does not match its content type. The session leaves the
// worker. One such answer may have other causes; a worker that gives only such answers is
// failing.
func (d *Dispatch) malformed() {
	a := d.attempt
	d.FallBack(fallbackUnreadable)
	a.Failed(time.Now(), 0)
	d.Pool.Report(a.Worker, a.Errored("the answer does not match its content type", true))
	d.turn.Forget(a.Target)
}

// computed returns whether the worker has certainly computed the prompt.
func (o *delivery) computed() bool { return o != nil && o.Summary.Computed() }

const serverTiming = "Server-Timing"

// label adds the headers that say how an attempt's request was routed, as far as the operator shows it.
func (d *Dispatch) label(a *attempt.Attempt, resp *http.Response) {
	a.Label(resp.Header)
	if d.ServerTiming {
		queued := d.wait.waited
		resp.Header.Add(serverTiming, timing("queue", queued)+", "+timing("route", a.Begun.Sub(d.start)-queued)+", "+
			timing("engine", time.Since(a.Begun)))
	}
	if d.CacheStatus {
		resp.Header.Add("Cache-Status", d.cacheStatus(a))
	}
}

// timing returns a metric of a Server-Timing field (W3C Server Timing, 3), in milliseconds.
func timing(name string, t time.Duration) string {
	return name + ";dur=" + strconv.FormatFloat(float64(t)/float64(time.Millisecond), 'f', 1, 64)
}

// cacheStatus returns a member of a Cache-Status field (RFC 9211) for the KV cache of the worker that computes
// the prompt.
func (d *Dispatch) cacheStatus(a *attempt.Attempt) string {
	by, status := a.Computes(), "hit"
	switch {
	case d.plan.Request == nil:
		return "kv_router;fwd=bypass"
	case by.Terms.OverlapTokens == 0:
		status = "fwd=miss"
	}
	return "kv_router;" + status + ";detail=" + a.Reason + ";kv-cached-tokens=" + strconv.FormatInt(by.Terms.OverlapTokens, 10) +
		";kv-prompt-tokens=" + strconv.FormatInt(by.Tokens, 10)
}
