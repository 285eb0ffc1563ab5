// Package dispatch takes one request over all its attempts. It selects a worker, sends the
// request, judges the result, retries, and reports the end. Caddy's reverse proxy enters by two
// doors: Select takes the seat of the first attempt, and RoundTrip makes all attempts.
package dispatch

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

type dispatchKey struct{}

// dispatchOf returns the dispatch of a request by its context; nil if there is none.
func dispatchOf(ctx context.Context) *Dispatch {
	d, _ := ctx.Value(dispatchKey{}).(*Dispatch)
	return d
}

// Dispatch is one request over all its attempts. Only the goroutine that serves the
// request touches it.
type Dispatch struct {
	route
	tries
	attempt.Call
	outgoing
	result
	start   time.Time
	wait    waiting // in the queue
	version uint64  // of the offers, see follower
}

// tries is the choice of workers so far.
type tries struct {
	attempt  *attempt.Attempt
	phases   *split.Phases // of the attempt; nil if the request is not split
	attempts int
	suspects int // failed attempts that may have reached an engine
	refusals
	triedBuf [4]*pool.Worker // backs tried for the first four workers
	failure  error           // of the last attempt
	held     heldAnswer
	later    bool // the client must try again later: see putsOff
}

// outgoing is what becomes of the request's body and header on the way to workers.
type outgoing struct {
	followUp FollowUp          // needs the body after the answer; nil if nothing follows
	lazy     *body.Lazy        // the body as the proxy sees it
	proxied  *http.Request     // the proxy's request for the first worker
	original upstream.Original // its header before that
	exact    bool              // the stream may go on elsewhere by the ids of its tokens
	cutIDs   bool              // the router has asked for these, and the client does not get them
	cut      nvext.Grants      // the grants that were missing for members cut out of the body
}

// result is what the client gets.
type result struct {
	answer   *delivery // nil while there is none
	cached   int64     // the engine's count of cached tokens; -1 is unknown
	err      error
	returned bool // false in End if the proxy panicked, as it does to abort
}

// Reasons of a choice.
const (
	ReasonSession = "session" // the worker is the one that the session is bound to
	reasonOverlap = "overlap"
	reasonLoad    = "load"
	// The request decides.
	ReasonPin      = "pin"
	ReasonResponse = "response"
)

// Begin begins to dispatch a request, and takes over the plan's body. The error is a
// refusal; the plan then keeps its body.
func (s *Dispatcher) Begin(p *plan.Plan, start time.Time) (*Dispatch, error) {
	if refused := s.checkModel(p); refused != nil {
		return nil, refused
	}
	d := &Dispatch{route: s.routeOf(p), start: start, result: result{cached: -1}}
	d.Call = attempt.Call{Runner: &s.Runner, Owner: d, Plan: p, ID: requestID(p.HTTP), Ready: d.ready, Body: p.Body, Exactly: resume.Exactly}
	if s.Resume.IsExact() && p.Request != nil && p.Request.Stream && p.Body != nil {
		d.exact = p.Request.GoesOnExactly(p.Body.Data)
	}
	if err := s.Sessions.Enter(p.HTTP.Context(), &d.turn, p, false); err != nil {
		return nil, err
	}
	d.split.Of = d
	d.forgetPrompt()
	if err := d.narrow(); err != nil {
		d.turn.End(false)
		return nil, err
	}
	d.CountDropped(p.Dropped, p.Malformed)
	s.Pool.Spending.Request(d.ready)
	d.tried = d.triedBuf[:0]
	p.Body = nil
	d.repl.Map(d.placeholder)
	if p.Fallback != "" {
		d.FallBack(p.Fallback)
	}
	return d, nil
}

// requestID returns the id of a request in logs and explanations.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-Id"); pool.ValidRequestID(id) { //nolint:canonicalheader // as Go spells it
		return id
	}
	return strconv.FormatUint(rand.Uint64(), 16) //nolint:gosec // no secret
}

// Settle returns the error for the client. err is what the proxy returned.
func (d *Dispatch) Settle(w http.ResponseWriter, err error) error {
	d.err, d.returned = err, true
	d.answer.noticeEncoding(w)
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
	if he, ok := errors.AsType[caddyhttp.HandlerError](cause); ok && he.Err != nil {
		cause = he.Err // without a place in Caddy's source
	}
	d.Logger.Error("no worker answered", zap.String("pool", d.Pool.Name), zap.Error(cause))
	return d.unserved(d.err)
}

// statusClientGone is what Caddy's access log shows of a client that has left.
const statusClientGone = 499

// FallBack records that the router lacks some knowledge for a request.
func (s *Dispatcher) FallBack(reason string) {
	s.Metrics.fallbacks.WithLabelValues(s.Pool.Name, reason).Inc()
	s.Pool.Incidents.Raise(time.Now(), "fallback "+reason, s.Pool.Logger)
}

// Unbound records that the store could not find or bind a session.
func (s *Dispatcher) Unbound() { s.FallBack(fallbackUnbound) }

// Request returns the request as the proxy gets it.
func (d *Dispatch) Request(r *http.Request) *http.Request {
	var ctx context.Context
	ctx, d.Trace = attempt.StartTrace(r.Context(), d.plan, d.Pool.Name, d.start)
	out := r.WithContext(context.WithValue(ctx, dispatchKey{}, d))
	out.Header = withoutUpgrade(d.plan.WithoutRouting(r.Header), d.plan.API != nil)
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

// withoutUpgrade returns a header without an offer that the engine must not see: of h2c, or of any
// other protocol with an inference. Java's HttpClient offers h2c with each request. The protocol
// no longer exists (RFC 9113, 3.1), but uvicorn then drops the body.
func withoutUpgrade(h http.Header, infers bool) http.Header {
	offers := strings.ToLower(strings.Join(h["Upgrade"], ","))
	if offers == "" || !infers && !strings.Contains(offers, "h2c") {
		return h
	}
	kept := maps.Clone(h) // the server's own is shared
	delete(kept, "Upgrade")
	return kept
}

// endAttempt ends the present attempt, if there is one. computed: the worker has computed the
// prompt.
func (d *Dispatch) endAttempt(computed bool) {
	a := d.attempt
	if a == nil || a.Left() {
		return
	}
	var answer *kvscore.Answer
	if computed && d.answer != nil && !d.Holds() {
		answer = &kvscore.Answer{Blocks: d.answer.Blocks, Identities: d.plan.IdentitiesOf(d.answer.Chains)}
	}
	d.leave(computed, answer)
	d.turn.RollBack()
}

// leave ends the present attempt with its phases.
func (d *Dispatch) leave(computed bool, answer *kvscore.Answer) {
	a, o := d.attempt, d.answer
	if d.phases != nil && !a.Left() {
		d.phases.Leave(o != nil && o.attempt == a && o.Whole)
		computed = computed && a.Answers == nil
	}
	a.Leave(computed, answer)
}

// Dispatcher sends the requests of one configuration to the workers of its pool. It is made
// once and does not change. It has more than 15 fields: one for each part of the
// configuration.
type Dispatcher struct {
	attempt.Runner
	Proxy *reverseproxy.Handler

	Policy     kvscore.Policy
	Sessions   *turn.Sessions
	Shadow     *shadow // nil if none is configured
	Timeouts   attempt.Timeouts
	Resume     resume.Config
	Limits     Limits
	RetryMatch caddyhttp.MatcherSets // the operator's lb_retry_match
	Legs       kvscore.Legs          // the rule by which requests are parted
	KeepBody   bool                  // other handlers may read the body after the answer's header

	Probes    asker
	FollowUps followUps
	// Speculative allows clients to ask for speculative prefills.
	Speculative bool
	Client      *upstream.Client

	tables      pool.Tables
	Metrics     *Metrics
	PoolMetrics *PoolMetrics
}

// asker asks workers what they serve.
type asker interface {
	// Discovered records that a dynamic source returned a worker.
	Discovered(*pool.Worker)
	// AskAgain soon asks a worker again which models it serves.
	AskAgain(*pool.Worker)
}

// AttemptOf returns the round tripper of a request that a dispatcher has begun; nil for other
// requests, such as health checks.
func AttemptOf(ctx context.Context) http.RoundTripper {
	if d := dispatchOf(ctx); d != nil {
		return d
	}
	return nil // and not a nil *Dispatch
}

// End ends everything that the request has begun, and returns what became of it. It runs
// deferred, also when the proxy aborts with a panic.
func (d *Dispatch) End() *Report {
	defer d.dropBody()
	defer d.plan.Once.Done()
	defer func() { d.turn.End(d.answer.computed()) }()
	if d.wait.waited > 0 {
		d.PoolMetrics.queueWait.Observe(d.wait.waited.Seconds())
	}
	if d.attempt != nil {
		d.endLast()
	}
	report := d.report()
	if a := report.attempt; a != nil {
		_, bad := report.fault()
		outcome := report.Outcome
		if outcome == outcomeEngineError && !bad {
			outcome = pool.AttemptClientError
		}
		a.End(outcome, bad)
	}
	if d.attempt != nil { // if it failed, and the client got a held answer
		d.attempt.End(outcomeUnavailable, true)
	}
	report.trace(d.Trace)
	return report
}

// endLast ends the last attempt, and records what the request has shown.
func (d *Dispatch) endLast() {
	d.held.drop()
	o := d.answer
	if o != nil {
		_ = o.body.Close() // if the proxy has not
	}
	d.endAttempt(o.computed())
	outcome := d.outcome()
	if outcome == outcomeBroken && !o.told {
		d.Pool.Report(o.attempt.Worker, o.attempt.Shows(pool.OutcomeBroken, "stream broke: "+o.Broken.Error()))
	}
	d.follow(outcome)
}

// Fallbacks that are found after the plan was made.
const (
	fallbackUnbound     = "unbound"           // the session has no binding
	fallbackUnreadable  = "answer_unreadable" // the engine's answer cannot be read as it passes
	fallbackUnmerged    = "models_unmerged"   // a list of models lacks the other workers' models
	fallbackOmitted     = "nvext_omitted"     // the answer cannot carry what the client asked for
	FallbackUntokenized = "untokenized"       // a query's answer has no token ids, as no engine returns them
)
