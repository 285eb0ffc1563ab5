package dispatch

import (
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"go.uber.org/zap"
)

// delivery is the answer of an attempt on its way to the client. It listens to the
// answer's body, and records what the answer shows of the worker.
type delivery struct {
	response.Summary // complete once the answer has ended
	rt               *Dispatch
	attempt          *Attempt
	body             *response.Body

	header    time.Time // when a plain answer's header came
	alive     time.Time // when the lease was last told of bytes
	refreshed time.Time // when the session's binding was
}

// deliveryOf makes the delivery of an attempt's answer, whose body it replaces.
func (rt *Dispatch) deliveryOf(a *Attempt, resp *http.Response) *delivery {
	d := &delivery{rt: rt, attempt: a}
	o := response.Options{Listener: d}
	if rt.plan.Request != nil && resp.StatusCode < 300 {
		d.refreshed = time.Now()
		o.Stream = body.MediaType(resp.Header) == body.EventStream
		if body.Compressed(resp.Header) { // although it was asked not to be
			rt.FallBack(fallbackUnreadable)
		} else {
			o.Request, o.CutUsage = rt.plan.Request, rt.plan.AsksUsage
		}
		if rt.Speculative && rt.plan.Ext.AgentHints.SpeculativePrefill.Value {
			o.KeepText = MaxKeptText
		}
		if a.guard != nil {
			o.Ctx = a.guard.ctx
		}
		o.Extras = rt.extras(a, o.Request != nil)
	}
	d.body = response.NewBody(resp, o)
	d.Summary = d.body.Sum
	resp.Body = d.body
	return d
}

// extras returns the nvext that the answer is to carry; nil if there is none. What an
// answer cannot carry is counted.
func (rt *Dispatch) extras(a *Attempt, readable bool) *response.Extras {
	x := rt.plan.Answer
	if x == nil {
		return nil
	}
	if !x.Fits || !readable {
		rt.FallBack(fallbackUntold)
		return nil
	}
	e := &response.Extras{
		Fields: x.Fields, Annotations: x.Annotations, ID: x.ID, IDs: x.IDs, Prompt: x.Prompt,
		Worker: a.Target.Worker, Rank: a.Target.Rank, Waiting: x.Waiting, Received: rt.start, Begun: a.Begun, HitRate: -1,
	}
	if rt.Pool.EngineOf(a.Worker).Type == engine.Dynamo {
		e.Annotations = 0 // it gets the request's nvext, and writes them itself
	}
	if n := a.prompt.tokens; n > 0 {
		e.HitRate = float64(a.terms.OverlapTokens) / float64(n)
	}
	return e
}

// observe makes an attempt's answer the client's, and records what its header shows.
func (rt *Dispatch) observe(req *http.Request, resp *http.Response) {
	a, noBody := rt.attempt, req.Method == http.MethodHead || resp.Body == http.NoBody
	d := a.answer
	if d == nil {
		d = rt.deliveryOf(a, resp)
	}
	rt.answer = d
	t := time.Now()
	switch good := rt.plan.Request != nil && resp.StatusCode < 300; {
	case d.Read && d.Stream: // its first token is still to come
	case d.Read:
		d.header = t // the answer was complete then, if it is one
	case good && !d.Stream:
		a.prefilled(t)
	default:
		a.lease.Prefilled(t) // whatever it was, it is over
	}
	if noBody {
		resp.Body = http.NoBody
		d.body.Finish()
	}
}

// prefilled records a first token. The prefills of a hung worker are not measured.
func (a *Attempt) prefilled(t time.Time) {
	if a.Worker.Progress.IsHung() {
		a.lease.Prefilled(t)
	} else {
		a.lease.FirstToken(t)
	}
}

// Waiting implements listener.
func (d *delivery) Waiting(worker bool) {
	if g := d.attempt.guard; g != nil && !d.alive.IsZero() {
		g.await(worker)
	}
	d.attempt.Waiting.Store(worker)
}

// Received implements listener.
func (d *delivery) Received(t time.Time) {
	a := d.attempt
	if t.Sub(d.alive) > time.Second {
		d.alive = t
		a.lease.Alive(t)
	}
	if a.Work != pool.WorkNone && d.Status < 300 {
		a.Worker.Progress.LastOutput.Store(pool.Ticks(t))
	}
}

// FirstToken implements listener.
func (d *delivery) FirstToken(t time.Time) {
	d.attempt.prefilled(t)
	d.rt.Figures.ttft.Observe(t.Sub(d.rt.start).Seconds())
	d.rt.didWell(d.attempt)
}

// Tokens implements listener. A long answer keeps its session alive.
func (d *delivery) Tokens(t time.Time, n int) {
	d.attempt.lease.Output(t, int64(n))
	if d.rt.session != "" && t.Sub(d.refreshed) > d.rt.sessionTTL()/4 {
		d.refreshed = t
		d.rt.Pool.Sessions.Get(d.rt.session)
	}
}

// ResponseID implements listener.
func (d *delivery) ResponseID(id string) {
	if !d.rt.plan.Request.Unstored {
		d.rt.Pool.Responses.Keep(id, d.attempt.lease.Target())
	}
}

// Ended implements listener.
func (d *delivery) Ended(s response.Summary) {
	d.Summary = s
	if s.Skipped {
		d.rt.FallBack(fallbackUntold)
	}
	if !s.Whole || !s.Read {
		return
	}
	switch a := d.attempt; {
	case s.Garbled:
		d.rt.garbled(a)
		return
	case !s.First.IsZero(): // the first token has shown that the worker is well
	case s.Failed:
		d.rt.erred(a, "an error as the answer, with a good status", false)
	default:
		if !s.Stream {
			completion := s.Completion
			if completion > 1 {
				completion = -1 // its time is that of these tokens, and says nothing of the prefill
			}
			a.lease.Answered(d.header, completion)
		}
		d.rt.didWell(a)
	}
	d.learn()
}

// close ends the delivery if the proxy has not.
func (d *delivery) close() {
	if d != nil {
		_ = d.body.Close()
	}
}

// computed returns whether the worker has certainly computed the prompt.
func (d *delivery) computed() bool { return d != nil && d.Summary.Computed() }

// didWell records a good answer to an attempt. Of a hung worker it shows nothing: a
// header is no progress.
func (rt *Dispatch) didWell(a *Attempt) {
	if !a.Worker.Progress.IsHung() && a.Worker.Health.Succeed(time.Now(), a.Begun) {
		rt.Logger.Info("worker is well again", zap.String("pool", rt.Pool.Name), zap.String("upstream", a.Worker.Dial))
	}
}

// garbled records that an answer was not what its content type says. Nothing is learned
// from it, and it does not keep the session. One such answer may be anybody's fault, but
// a worker that gives no others is ill.
func (rt *Dispatch) garbled(a *Attempt) {
	rt.FallBack(fallbackUnreadable)
	rt.erred(a, "not what their content type says", true)
	if rt.seenAt == a.lease.Target() {
		rt.Pool.Sessions.Remove(rt.session, rt.bound)
	}
}

// conditionEncoded lasts while event streams leave compressed: block by block,
// which costs CPU time for each token, saves little, and lets clients that
// decode in larger pieces see their tokens late.
const conditionEncoded = "event streams leave compressed (keep encode away from them)"

// noticeEncoding takes in that a stream left compressed that the engine had
// sent as it was. Which handlers stand before this one is not known: what they
// do shows in the header that they share.
func (rt *Dispatch) noticeEncoding(w http.ResponseWriter) {
	if o := rt.answer; o != nil && o.Stream && o.Read && body.Compressed(w.Header()) {
		rt.Pool.Incidents.Raise(time.Now(), conditionEncoded, rt.Pool.Logger)
	}
}
