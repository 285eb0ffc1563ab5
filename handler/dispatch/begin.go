package dispatch

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Begin begins to dispatch a request, and takes over the plan's body. The error is a
// refusal; the plan then keeps its body.
func (s *Dispatcher) Begin(p *plan.Plan, start time.Time) (*Dispatch, error) {
	if refused := s.checkModel(p); refused != nil {
		return nil, refused
	}
	d := &Dispatch{route: s.routeOf(p), start: start, cached: -1}
	d.Call = attempt.Call{Runner: &s.Runner, Owner: d, Plan: p, Ready: d.ready, Body: p.Body, Exactly: resume.Exactly}
	if s.Resume.IsExact() && p.Request != nil && p.Request.Stream && p.Body != nil {
		d.exact = p.Request.GoesOnExactly(p.Body.Data)
	}
	d.split.Of = d
	if err := d.enter(false); err != nil {
		d.turn.End(false)
		return nil, err
	}
	d.CountDropped(p.Dropped, p.Malformed)
	s.Pool.Budget.Request(d.ready)
	d.tried = d.triedBuf[:0]
	p.Body = nil
	d.repl.Map(d.placeholder)
	if p.Fallback != "" {
		d.FallBack(p.Fallback)
	}
	return d, nil
}

// Request returns the request as the proxy gets it.
func (d *Dispatch) Request(r *http.Request) *http.Request {
	var ctx context.Context
	ctx, d.Trace = attempt.StartTrace(r.Context(), d.plan, d.Pool.Name, d.start)
	out := r.WithContext(context.WithValue(ctx, dispatchKey{}, d))
	out.Header = withoutOffers(d.plan.WithoutRouting(r.Header), d.plan.API != nil, d.Body != nil)
	out.Trailer = nil // it could have routing headers, and engines read none
	if d.Body == nil {
		out.Body = d.plan.Once
		return out
	}
	out.Body, out.TransferEncoding = http.NoBody, nil
	if d.Body.Size > 0 || r.ContentLength < 0 {
		d.lazy = &body.Lazy{Of: d.Body}
		out.Body = d.lazy
	}
	if r.ContentLength < 0 {
		return out // it is sent in chunks, as it came
	}
	out.ContentLength = d.Body.Size
	if r.ContentLength != out.ContentLength && r.Header.Get("Content-Length") != "" {
		out.Header = maps.Clone(out.Header) // the server's own is shared
		out.Header.Set("Content-Length", strconv.FormatInt(out.ContentLength, 10))
	}
	return out
}

// withoutOffers returns a header without what the engine must not see. That is an offer of h2c, or of any
// other protocol with an inference. Java's HttpClient offers h2c with each request. The protocol
// no longer exists (RFC 9113, 3.1), but uvicorn then drops the body. An engine that gets a whole body need not
// say that it expects one.
func withoutOffers(h http.Header, infers, whole bool) http.Header {
	offers := strings.ToLower(strings.Join(h["Upgrade"], ","))
	upgrades := offers != "" && (infers || strings.Contains(offers, "h2c"))
	expects := whole && len(h["Expect"]) > 0
	if !upgrades && !expects {
		return h
	}
	kept := maps.Clone(h) // the server's own is shared
	if upgrades {
		delete(kept, "Upgrade")
	}
	if expects {
		delete(kept, "Expect")
	}
	return kept
}

// statusClientGone is what Caddy's access log shows of a client that has left.
const statusClientGone = 499

// Settle returns the error for the client. err is what the proxy returned.
func (d *Dispatch) Settle(w http.ResponseWriter, err error) error {
	d.err, d.returned = err, true
	if o := d.answer; o != nil && o.Stream && o.Read && body.Compressed(w.Header()) { // by a handler before this one
		d.Pool.Raise(time.Now(), "event streams are compressed: exclude them from encode")
	}
	if d.err == nil {
		return nil
	}
	if d.wait.left != nil { // the proxy says so only if RoundTrip returned it
		w.WriteHeader(statusClientGone)
		d.err = nil
		return nil
	}
	if d.answer != nil || d.plan.HTTP.Context().Err() != nil {
		return d.err
	}
	if d.wait.turnedAway != nil {
		return d.wait.turnedAway
	}
	cause := cmp.Or(d.failure, d.err)
	var he caddyhttp.HandlerError
	if errors.As(cause, &he) && he.Err != nil {
		cause = he.Err // without a place in Caddy's source
	}
	d.Logger.Error("no worker answered", zap.String("pool", d.Pool.Name), zap.Error(cause))
	e := &api.Refusal{API: d.plan.API, Status: http.StatusBadGateway, Code: api.CodeFailed}
	var refused reverseproxy.DialError
	var own *api.Refusal
	switch {
	case errors.As(err, &own) || errors.As(d.failure, &own):
		return own
	case d.plan.Once != nil && d.plan.Once.Failed.Load():
		return plan.Unreadable(d.plan.API, err)
	case d.failure == nil || errors.As(d.failure, &refused) && d.suspects < maxSuspects:
		e.Status, e.Code = http.StatusServiceUnavailable, api.CodeNoWorker
		e.Err = d.errNobody()
	case errors.As(err, &he) && he.StatusCode == http.StatusGatewayTimeout:
		e.Status, e.Code = he.StatusCode, api.CodeTimeout
		e.Err = errors.New("the worker did not answer in time")
	default:
		e.Err = errors.New("the worker failed before it answered")
	}
	return e
}

// End ends everything that the request has begun, and returns what became of it. It runs
// deferred, also when the proxy aborts with a panic.
func (d *Dispatch) End() *Report {
	defer func() { d.takeBody().Done() }()
	defer d.plan.Once.Done()
	computed := false
	defer func() { d.turn.End(computed) }()
	if d.wait.waited > 0 {
		d.Series.queueWait.Observe(d.wait.waited.Seconds())
	}
	o := d.answer
	if o != nil {
		_ = o.body.Close() // if the proxy has not
		computed = o.Computed()
	}
	d.held.drop()
	d.endAttempt(computed)
	req, away := d.plan.Request, d.wait.turnedAway
	if req != nil && req.Stream && (o == nil || o.First.IsZero()) && (away == nil || away.Code != api.CodeLate) && time.Since(d.ready) > d.plan.TTFT {
		d.promised(promiseLate) // its client left, or no worker had a free slot
	}
	report := d.report()
	_, bad := report.fault()
	if report.Outcome == outcomeBroken && !o.reported {
		d.Pool.Report(o.attempt.Worker, o.attempt.Shows(worker.OutcomeBroken, "stream broke: "+o.Broken.Error()))
	}
	if d.followUp != nil {
		var text []byte
		if report.Outcome == outcomeOK && computed {
			text = o.Text
		}
		d.followUp(text, d.takeBody(), d.Sent)
		d.followUp = nil
	}
	if a := report.attempt; a != nil {
		outcome := report.Outcome
		if outcome == outcomeEngineError && !bad {
			outcome = observe.AttemptClientError
		}
		a.CountOutcome(outcome, bad)
	}
	if d.attempt != nil { // if it failed, and the client got a held answer
		d.attempt.CountOutcome(outcomeUnavailable, true)
	}
	report.trace(d.Trace)
	return report
}

// mayGoOn returns whether the request's stream may go on elsewhere.
func (d *Dispatch) mayGoOn() bool {
	return !d.Resume.IsOff() && d.plan.Request != nil && d.plan.Request.Stream &&
		!d.plan.Given && d.fixed == nil && !d.Holds() && len(d.offers.Ups) > 1
}

// freeBody frees the body, which is not sent again, unless something else needs it: an answer may take long.
func (d *Dispatch) freeBody() {
	if !d.KeepBody && d.followUp == nil {
		d.takeBody().Done()
	}
}

// takeBody takes the request's body, if it is still there, from everything that might send it again. A follow-up
// that has it may be under way, and reads what was sent.
func (d *Dispatch) takeBody() *body.Replay {
	whole := d.Body
	if whole == nil {
		return nil
	}
	d.Body = nil
	if d.lazy != nil {
		d.lazy.Release()
	}
	if d.Sent != nil {
		d.Sent.GetBody = nil
	}
	return whole
}

// Track implements response.Mover.
func (o *delivery) Track(a *api.Answer) {
	d := o.d
	if o.noRoom = d.Body == nil; o.noRoom {
		return
	}
	memory := &d.Pool.Memory.Held
	a.Track(d.Body.Data, d.Resume.Tokens, d.exact, func(n int) bool {
		o.room += int64(n)
		return memory.Add(int64(n)) <= body.MaxBytes()
	})
}

// PinStream implements response.Mover.
func (o *delivery) PinStream() {
	o.attempt.ForbidMove()
	o.d.freeBody()
}
