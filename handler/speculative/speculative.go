// Package speculative prefills the beginning of a session's next turn, if the client asks
// for it and the worker has time.
package speculative

import (
	"context"
	"errors"
	"math"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
)

// The outcomes of speculative prefills.
const (
	outcomeOK      = "ok"      // it was computed
	outcomeFailed  = "failed"  // the worker did not answer, or with an error
	outcomeTimeout = "timeout" // it took too long
	outcomeStopped = "stopped" // the configuration ended
	outcomeBusy    = "busy"    // the worker had too much to do
	outcomeLimit   = "limit"   // the bound on their number was reached
	outcomeMemory  = "memory"  // there was no memory for the body
	outcomeUnfit   = "unfit"   // the turn did not end well, or its answer is too long or not all text
	outcomeOff     = "off"     // the operator does not allow it
)

const incidentNoSuccess = "speculative prefills fail"

var total = observe.Counter("speculative_total", "Turns whose clients asked for a speculative prefill, by its outcome.", "outcome")

// Runner makes the speculative prefills of a configuration.
type Runner struct {
	ctx     context.Context // ends with the configuration
	pool    *pool.Pool
	client  *upstream.Client
	allowed bool // by the operator
}

// NewRunner returns the runner of a configuration, which ends with ctx. allowed is whether the
// operator allows speculative prefills.
func NewRunner(ctx context.Context, p *pool.Pool, client *upstream.Client, allowed bool) *Runner {
	total.WithLabelValues(p.Name, outcomeOK) // shows 0
	return &Runner{ctx: ctx, pool: p, client: client, allowed: allowed}
}

// Answering is for [dispatch.Dispatcher]. It expects a speculative prefill if the client asked for one. An
// engine that gets the hint prefills by itself.
func (r *Runner) Answering(a *attempt.Attempt, held bool, resp *http.Response) dispatch.FollowUp {
	p := a.Call.Plan
	if !p.Ext.AgentHints.SpeculativePrefill.Value {
		return nil
	}
	if e := a.Worker.Engine(); e.ReadsNVExt() {
		return nil
	}
	switch {
	case !r.allowed:
		r.count(outcomeOff)
		return nil
	case a.Worker.IsDecode() || a.Worker.IsBackup(), p.Request == nil || !p.Request.Continues() || p.Session.Final || held || p.Ext.TokenCount > 0,
		resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) || a.Call.Body == nil:
		r.count(outcomeUnfit)
		return nil
	}
	within, release := r.pool.Memory.Reserve(dispatch.MaxKeptText)
	if !within {
		release()
		r.count(outcomeMemory)
		return nil
	}
	return (&speculation{r: r, turn: a, release: release}).begin
}

func (r *Runner) count(outcome string) {
	total.WithLabelValues(r.pool.Name, outcome).Inc()
	if outcome == outcomeFailed || outcome == outcomeTimeout {
		r.pool.Raise(time.Now(), incidentNoSuccess)
	}
}

const (
	// maxDuration is how long one may take: the longest that a client's request waits for its
	// slot.
	maxDuration = 5 * time.Second
	// One begins only if the target has at most busyRequests active requests and
	// busyPrefill booked prefill tokens: a quarter of an engine's step of 2048.
	busyRequests, busyPrefill = 8, 512
	// maxBehind is the most tokens of an answer, which may have to be computed again: about one
	// step of an engine. A client's request waits no longer than that.
	maxBehind = 2048
	// lowestPriority is below any that a client gives.
	lowestPriority = math.MinInt32 + 1
	maxAnswer      = 1 << 20 // bytes that are read of its answer
)

// speculation is a speculative prefill that a client asked for. Once its turn has ended
// well, the router sends a request for one token to the same worker. That request begins as
// the next turn will.
type speculation struct {
	r       *Runner
	turn    *attempt.Attempt
	release func() // ends the reservation of memory for the answer's text

	// set when it begins
	body   *body.Replay
	sent   *http.Request // the turn's
	text   []byte        // of its answer, as JSON
	blocks []uint64      // of prompt and answer
	past   float32       // prompt and answer beyond the last block, in blocks
	behind int64         // tokens of the answer
}

// begin starts the speculative prefill if the turn has ended well.
func (s *speculation) begin(text []byte, whole *body.Replay, sent *http.Request) {
	s.text, s.body, s.sent = text, whole, sent
	if text == nil || whole == nil || sent == nil || !s.fits() {
		s.end(outcomeUnfit)
		return
	}
	over, ok := s.turn.Worker.Speculate()
	if !ok {
		s.end(outcomeLimit)
		return
	}
	go func() {
		outcome := s.prefill()
		over()
		s.end(outcome)
	}()
}

// fits finds out how long the answer is, and returns whether it is short enough.
func (s *speculation) fits() bool {
	p := s.turn.Call.Plan
	s.blocks, s.past = p.Request.BlocksWith(s.text)
	more := float64(len(s.blocks)-len(p.Request.Blocks)) + float64(s.past-p.Request.Past)
	s.behind = int64(more*p.Score.Weights.Mean(s.blocks[len(p.Request.Blocks):])) + 1
	return s.behind <= maxBehind
}

// end frees what is kept for the prefill, and counts its outcome.
func (s *speculation) end(outcome string) {
	if s.body != nil {
		s.body.Done()
	}
	s.release()
	s.r.count(outcome)
}

// prefill lets the worker compute the prefix, and returns the outcome.
func (s *speculation) prefill() (outcome string) {
	switch {
	case s.r.ctx.Err() != nil:
		return outcomeStopped
	case s.isBusy(time.Now()):
		return outcomeBusy
	}
	p := s.next()
	if p == nil {
		return outcomeUnfit
	}
	a := &attempt.Attempt{Call: &attempt.Call{Plan: p, Body: s.body}}
	if !s.r.pool.SeatAt(s.turn.Worker, s.turn.Target, &p.Score, &a.Seat) {
		return outcomeBusy
	}
	ctx, cancel := context.WithTimeout(s.r.ctx, maxDuration)
	defer cancel()
	_, _, answer, err := a.Read(a.Build(ownRequest(ctx, s.sent)), s.forward, maxAnswer)
	if err == nil && !answer.Parseable() {
		err = attempt.ErrUnread
	}
	a.Leave(err == nil, nil)
	switch {
	case err == nil:
		return outcomeOK
	case s.r.ctx.Err() != nil:
		return outcomeStopped
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return outcomeTimeout
	}
	return outcomeFailed
}

// isBusy returns whether the prefill would delay other requests on the target, or the
// target should get no requests.
func (s *speculation) isBusy(t time.Time) bool {
	w := s.turn.Worker
	load, known := s.r.pool.Scheduler.Load(t, s.turn.Target)
	running, limit := w.Running()
	return !known || load.Requests > busyRequests || load.PrefillTokens > busyPrefill ||
		limit > 0 && 2*(running+1) > limit || s.r.pool.Waiting() > 0 ||
		!w.TakesRequests(t) || w.IsHung() || !pool.Available(s.turn.Upstream)
}

// next returns the plan of the request that computes the prefix, nil if there can
// be none. Its body replaces the turn's.
func (s *speculation) next() *plan.Plan {
	old, of := s.body, s.turn.Call.Plan
	b := body.NewBuffer(old.Size + int64(len(s.text)) + 256)
	data, ok := of.Request.NextTurn(b.Data[:0], old.Data, s.text)
	b.Data = data
	s.r.pool.Memory.Count(b)
	s.body = body.NewReplay(b, data)
	old.Done()
	if !ok {
		return nil
	}
	req, err := api.Parse(of.API, data, s.r.pool.Hashing())
	if err != nil {
		return nil
	}
	p := &plan.Plan{API: of.API, Request: req, Model: of.Model, Public: of.Public}
	p.Ext, p.Grants, p.EditsBody, p.Score = ownExt(of.Ext), of.Grants, true, of.Score
	p.Score.Blocks, p.Score.Past, p.Score.Tokens, p.Score.Streamed = s.blocks, s.past, of.Score.Tokens+s.behind, false
	return p
}

// ownExt returns the fields of a turn's nvext that decide which cache a prompt is for,
// with the lowest priority.
func ownExt(e *nvext.Ext) *nvext.Ext {
	return &nvext.Ext{
		UseRawPrompt: e.UseRawPrompt, CacheSalt: e.CacheSalt, Tenant: e.Tenant, CacheTTL: e.CacheTTL,
		AgentHints: nvext.AgentHints{Priority: nvext.Some[int32](lowestPriority)},
	}
}

// forward makes a round trip once, on a connection of its own.
func (s *speculation) forward(req *http.Request) (*http.Response, error) {
	delete(req.Header, "Idempotency-Key")
	return s.r.client.Forward(req, s.turn.Worker.Dial)
}

// ownRequest returns a request of the router's own to where a client's request went, with the
// client's credentials.
func ownRequest(ctx context.Context, of *http.Request) *http.Request {
	req := of.WithContext(ctx)
	u := *of.URL
	u.Scheme = "" // the transport knows it
	req.URL = &u
	req.Header = of.Header.Clone()
	for _, name := range []string{
		plan.HeaderRequestID, "Idempotency-Key", "Content-Length", "Content-Encoding",
		"Content-Md5", "Digest", "Content-Digest", "Expect", "Trailer", "Upgrade", "Connection",
		"Traceparent", "Tracestate", "Baggage", engine.HeaderRank, // the adapter sets it
	} {
		delete(req.Header, name)
	}
	req.Header.Set("Accept", "application/json")
	req.Trailer, req.TransferEncoding, req.Response = nil, nil, nil
	return req
}
